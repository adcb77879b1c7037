"""`fut-run`: options, output, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fut_runtime.engine
from fake_backend import FakeBackend, model_spec
from fut_runtime.cli import main
from fut_runtime.commands.output import write_text
from fut_runtime.engine import Engine
from fut_runtime.tokenizer import Tokenizer
from small_tokenizers import byte_level

Run = Callable[..., Result]
TOKENIZER = byte_level()
QUESTION = TOKENIZER.encode("?")[0]


class Answering(FakeBackend):
    """Answers with what follows the last `?`: as many 'hello's as the prompt has question marks, then the end."""

    interrupt_after: int | None = None

    def decode(self, tokens: Any) -> Any:
        decoded = sum(kind == "decode" for kind, _ in self.calls)
        if decoded == self.interrupt_after:
            raise KeyboardInterrupt
        return super().decode(tokens)


def answer(tokens: list[int]) -> int:
    hello, end = TOKENIZER.encode("hello")[0], TOKENIZER.eos_token_id
    assert end is not None
    return hello if list(tokens).count(hello) < list(tokens).count(QUESTION) else end


@pytest.fixture
def backend() -> Answering:
    return Answering(model_spec(TOKENIZER.vocab_size, context=300), answer)  # type: ignore[arg-type]


@pytest.fixture
def loaded() -> dict[str, Any]:
    """What the engine was asked for."""
    return {}


@pytest.fixture
def run(backend: Answering, loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Run:
    tokenizers: list[Tokenizer] = [TOKENIZER]

    def load(model: str, **options: Any) -> Engine:
        loaded.update(options, model=model)
        sizes = {k: v for k, v in options.items() if k in ("prefill_chunk", "max_batch")}
        return Engine.from_backend(backend, tokenizers[0], **sizes)

    monkeypatch.setattr(fut_runtime.engine, "Engine", load)

    def invoke(*args: str, stdin: str | bytes | None = None, tokenizer: Tokenizer | None = None) -> Result:
        tokenizers[0] = tokenizer or TOKENIZER
        result = CliRunner().invoke(main, list(args), input=stdin)
        assert backend.open == {}
        return result

    return invoke


def test_one_prompt_streams_its_answer(run: Run, loaded: dict[str, Any]) -> None:
    result = run("generate", "OUT", "--prompt", "a??", "--decode-mode", "fp8", "--kv-cache", "bf16")
    assert result.exit_code == 0
    assert result.stdout == "hellohello\n"
    assert "loaded in" in result.stderr
    assert "first token after" in result.stderr and "tokens/s, ended by eos" in result.stderr
    assert loaded["model"] == "OUT" and (loaded["decode_mode"], loaded["kv_cache"]) == ("fp8", "bf16")
    assert "prefill_mode" not in loaded


def test_the_prompt_is_a_user_message_unless_raw(run: Run, backend: Answering) -> None:
    for args in (["--system", "s"], [], ["--raw"]):
        assert run("generate", "OUT", "--prompt", "a?", *args).exit_code == 0
    lengths = [call[0][1] for kind, call in backend.calls if kind == "prefill"]
    user, system = [{"role": "user", "content": "a?"}], [{"role": "system", "content": "s"}]
    expected = [TOKENIZER.encode_chat([*system, *user]), TOKENIZER.encode_chat(user), TOKENIZER.encode("a?")]
    assert lengths == [len(ids) for ids in expected]


def test_without_a_template_text_is_continued_and_said_so(run: Run) -> None:
    plain = byte_level(chat_template=None)
    result = run("generate", "OUT", "--prompt", "a?", tokenizer=plain)
    assert (result.exit_code, result.stdout) == (0, "hello\n")
    assert "no chat template" in result.stderr
    result = run("generate", "OUT", "--prompt", "a?", "--system", "s", tokenizer=plain)
    assert result.exit_code == 1 and "this model has none" in result.stderr


def test_standard_input_is_a_prompt(run: Run) -> None:
    assert run("generate", "OUT", stdin="a\n?\n").stdout == "hello\n"
    result = run("generate", "OUT", stdin="")
    assert result.exit_code == 2 and "no prompt" in result.stderr


def test_a_file_is_a_batch(run: Run, tmp_path: Path, loaded: dict[str, Any]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first ??\n\nsecond ?\n")
    result = run("generate", "OUT", "--prompts-file", str(file), "--batch-size", "1")
    assert result.stdout == "[1/2] first ??\nhellohello\n\n[2/2] second ?\nhello\n\n"
    assert "2 prompts" in result.stderr and loaded["max_batch"] == 1


def test_json_lines(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "?"},
    ]
    entries = ["a ??", {"prompt": "b ?", "system": "?"}, {"messages": messages}]
    file.write_text("\n".join(map(json.dumps, entries)))
    result = run("generate", "OUT", "--prompts-file", str(file), "--json", "--logprobs", "2", "--stop", "never")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["text"] for line in lines] == ["hellohello"] * 3
    assert [line["prompt"] for line in lines] == entries
    first = lines[0]
    assert (first["index"], first["finish_reason"], first["completion_tokens"]) == (0, "eos", 3)
    assert [entry["token"] for entry in first["logprobs"]] == ["hello", "hello", "<|im_end|>"]
    assert first["logprobs"][0]["top"][0]["token_id"] == first["token_ids"][0]
    assert len(first["logprobs"][0]["top"]) == 2


def test_logprobs_for_readers_go_to_standard_error(run: Run) -> None:
    result = run("generate", "OUT", "--prompt", "?", "--logprobs", "1")
    assert result.stdout == "hello\n"
    assert "'hello'" in result.stderr and "'<|im_end|>'" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompts"),
        (b'"a"\n{', "line 2: not valid JSON"),
        (b"3", "line 1: expected a string or an object, found int"),
        (b'{"promt": "a"}', r"unknown keys ['promt']"),
        (b'{"system": "a"}', "expected either prompt or messages"),
        (b'{"prompt": ""}', "prompt is '', expected a non-empty str"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[" * 100_000, "line 1: not valid JSON"),
        (b'"a\\ud800"', "half a surrogate pair"),
    ],
)
def test_broken_prompt_files(run: Run, tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    result = run("generate", "OUT", "--prompts-file", str(file))
    assert result.exit_code == 1 and message in result.stderr
    missing = run("generate", "OUT", "--prompts-file", str(tmp_path / "none"))
    assert missing.exit_code == 1 and "No such file" in missing.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-p", "2"], "top_p is 2.0, expected a number above 0 and at most 1"),
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max-new-tokens"),
        (["--decode-mode", "int3"], "decode-mode"),
        (["--raw", "--system", "s"], "--raw turns off"),
        (["--prompts-file", "x"], "not both"),
        (["--nonsense"], "nonsense"),
        (["--stop", "a\udcff"], "not Unicode text"),
    ],
)
def test_wrong_usage_exits_2(run: Run, args: list[str], message: str) -> None:
    result = run("generate", "OUT", "--prompt", "a", *args)
    assert result.exit_code == 2 and message in result.stderr


def test_an_empty_prompt_has_a_line_of_its_own_in_a_batch(run: Run) -> None:
    result = run("generate", "OUT", "--prompt", "", "--prompt", "?")
    assert (result.exit_code, result.stdout) == (0, "[1/2] \n\n\n[2/2] ?\nhello\n\n")


def test_command_lines_and_chats_that_are_not_utf_8(run: Run) -> None:
    # Python hands bytes of the command line that are not UTF-8 over as lone surrogates.
    for option in (["--raw", "--prompt", "a\udcff"], ["--prompt", "a", "--system", "a\udcff"]):
        result = run("generate", "OUT", *option)
        assert result.exit_code == 1 and "half a surrogate pair" in result.stderr
    result = run("chat", "OUT", stdin=b"\xff\n")
    assert result.exit_code == 1 and "standard input: not UTF-8" in result.stderr


def test_greedy_says_what_it_ignores(run: Run) -> None:
    result = run("generate", "OUT", "--prompt", "a", "--top-p", "0.5", "--seed", "1")
    assert "--top-p, --seed has no effect at temperature 0" in result.stderr
    assert "note" not in run("generate", "OUT", "--prompt", "a", "--top-p", "0.5", "--temperature", "1").stderr


def test_failures_exit_1_without_a_traceback(run: Run, backend: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("generate", "OUT", "--raw", "--prompt", "a" * 400)
    assert result.exit_code == 1
    assert "Error: the prompt has 400 tokens; the model's context is 300" in result.stderr

    def exhausted(capacity: int) -> int:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(backend, "open_request", exhausted)
    result = run("generate", "OUT", "--prompt", "a")
    assert result.exit_code == 1 and "Error: out of memory" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_standard_output_is_one_message() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", "from fut_runtime.cli import main; main(['info', '--json'])"]
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_artifact_is_named(tmp_path: Path) -> None:
    for command in (["generate", "--prompt", "a"], ["chat"], ["info"]):
        result = CliRunner().invoke(main, [command[0], str(tmp_path / "none"), *command[1:]])
        assert result.exit_code == 1 and "none: no such directory" in result.stderr


def test_interrupt_keeps_what_came(run: Run, backend: Answering) -> None:
    backend.interrupt_after = 1
    result = run("generate", "OUT", "--prompt", "?????")
    assert (result.exit_code, result.stdout) == (130, "hellohello\n")
    assert "ended by interrupt" in result.stderr
    backend.calls.clear()
    result = run("generate", "OUT", "--prompt", "?????", "--prompt", "b?", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 130
    assert [(line["text"], line["finish_reason"]) for line in lines] == [
        ("hellohello", "interrupted"),
        ("hello", "eos"),
    ]


def test_chat_keeps_the_conversation(run: Run, backend: Answering) -> None:
    lines = "?\n?\n/reset\n\n??\n/system ?\n?\n/help\n/nonsense\n/exit\nnever\n"
    result = run("chat", "OUT", "--system", "s", stdin=lines)
    assert result.exit_code == 0
    # The second answer says hello until there are as many as questions: the history holds one of two.
    assert result.stdout == "hello\nhello\nhellohello\nhellohello\n"
    assert "/reset " in result.stderr and "no such command: /nonsense" in result.stderr
    assert run("chat", "OUT", stdin="?\n").stdout == "hello\n"


def test_chat_goes_on_after_an_error_and_an_interrupt(run: Run, backend: Answering) -> None:
    result = run("chat", "OUT", stdin="x" * 400 + "\n?\n")
    assert result.exit_code == 0 and "/reset starts over" in result.stderr
    assert result.stdout == "hello\n"
    backend.calls.clear()
    backend.interrupt_after = 1
    result = run("chat", "OUT", stdin="?????\n")
    assert (result.exit_code, result.stdout) == (0, "hellohello\n") and "cut short" in result.stderr
    result = run("chat", "OUT", tokenizer=byte_level(chat_template=None))
    assert result.exit_code == 1 and "no chat template" in result.stderr


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["info"], ["eval"], ["eval", "perplexity"]])
def test_help_teaches(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout and ("Example" in result.stdout or command == ["eval"])


def test_help_does_not_load_pytorch() -> None:
    code = "import sys; from fut_runtime.cli import main; main(['generate', '--help'], standalone_mode=False); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        encoding = "latin-1"
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    write_text("a\x1b[2Jb\tc\n漢é")
    assert terminal.text == "a?[2Jb\tc\n?é"


def test_ctrl_c_in_a_real_process() -> None:
    code = (
        "import time, fut_runtime.engine, test_run_cli as t\n"
        "class Slow(t.Answering):\n"
        "    def decode(self, tokens):\n"
        "        time.sleep(0.05)\n"
        "        return super().decode(tokens)\n"
        "backend = Slow(t.model_spec(t.TOKENIZER.vocab_size, context=10_000), t.answer)\n"
        "engine = t.Engine.from_backend(backend, t.TOKENIZER)\n"
        "fut_runtime.engine.Engine = lambda model, **options: engine\n"
        "t.main(['generate', 'OUT', '--prompt', '?' * 5000, '--max-new-tokens', '5000'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.read(10) == b"hellohello"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out.endswith(b"\n") and not out.strip(b"\n").replace(b"hello", b"")
    assert b"Traceback" not in err and b"ended by interrupt" in err

"""The measure of the read bandwidth reads every byte once, and no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fut_runtime.cuda.library import CudaCallError, library

CHUNK = 16384


@pytest.mark.parametrize("chunks", [1, 7, 131, 132, 133, 3000])
def test_the_checksum_is_that_of_all_words(chunks: int) -> None:
    words = torch.randint(-(2**31), 2**31, (chunks * CHUNK // 4 + 64,), dtype=torch.int64).to(torch.int32)
    checksum = torch.full((1,), 5, dtype=torch.int32, device="cuda")
    data = words.cuda()
    library().call("fut_read_bandwidth", data.data_ptr(), chunks * CHUNK, checksum.data_ptr(), None)
    torch.cuda.synchronize()
    assert checksum.item() == np.bitwise_xor.reduce(words[:-64].numpy()) ^ 5


def test_sizes_that_are_no_whole_chunks_are_refused() -> None:
    data = torch.zeros(2 * CHUNK, dtype=torch.uint8, device="cuda")
    checksum = torch.zeros(1, dtype=torch.int32, device="cuda")
    for offset, nbytes, reason in ((0, 0, "multiple of 16384"), (0, CHUNK + 16, "multiple of 16384"), (8, CHUNK, "16")):
        with pytest.raises(CudaCallError, match=reason):
            library().call("fut_read_bandwidth", data.data_ptr() + offset, nbytes, checksum.data_ptr(), None)

#include "emulation.h"

#include <ucontext.h>

#include <map>
#include <memory>
#include <random>
#include <vector>

thread_local dim3 threadIdx, blockIdx;
dim3 gridDim, blockDim;

int emulated_multiprocessors() {
  const char* count = std::getenv("EMULATED_MULTIPROCESSORS");
  return count == nullptr ? 5 : std::atoi(count);
}

namespace emulation {

namespace {

constexpr size_t kSharedBytes = 232448;
constexpr size_t kStackBytes = 1 << 17;
constexpr int kIdleRounds = 4000;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  uint64_t gathered[32];
  void* local = nullptr;  // fiber_local(); fibers are kept, and what is theirs with them
  bool done = false;
};

struct Warp {
  uint64_t in[32], out[32];
  int arrived = 0;
  uint64_t generation = 0;
};

struct Rendezvous {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Cta {
  alignas(1024) uint8_t shared[kSharedBytes];
  std::vector<Warp> warps;
  std::map<int, Rendezvous> barriers;
};

struct Barrier {
  int expected, pending;
  int64_t bytes = 0;
  uint64_t phase = 0;
};

struct Copy {
  std::function<void()> land;
  uint32_t bytes;
  uint64_t* barrier;
};

ucontext_t scheduler;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::unique_ptr<Cta>> ctas;  // of the cluster that runs
std::map<uint64_t*, Barrier> barriers;
std::vector<Copy> copies;
Rendezvous cluster;
std::function<void()>* body;
std::mt19937 random_numbers(1);
int current, block_threads, cluster_size;
bool progress;

Cta& cta() { return *ctas[current / block_threads]; }

void arrive(Rendezvous& place, int threads) {
  if (++place.arrived < threads) return;
  place.arrived = 0;
  ++place.generation;
  progress = true;
}

void meet(Rendezvous& place, int threads) {
  const uint64_t generation = place.generation;
  arrive(place, threads);
  while (place.generation == generation) yield();
}

void settle(Barrier& barrier) {
  if (barrier.pending < 0) {
    std::printf("a barrier has had more arrivals than it expects\n");
    std::abort();
  }
  if (barrier.pending == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    barrier.pending = barrier.expected;
  }
  progress = true;
}

void land(size_t index) {
  const Copy copy = std::move(copies[index]);
  copies.erase(copies.begin() + static_cast<long>(index));
  copy.land();
  Barrier& barrier = barriers.at(copy.barrier);
  barrier.bytes -= copy.bytes;
  settle(barrier);
}

void begin() {
  (*body)();
  fibers[current]->done = true;
  progress = true;
  swapcontext(&fibers[current]->context, &scheduler);
}

[[noreturn]] void report_deadlock(int left) {
  std::printf("deadlock in cluster of CTA %u: %d threads left, %zu copies on their way\n", blockIdx.x, left,
              copies.size());
  for (size_t c = 0; c < ctas.size(); ++c)
    for (size_t w = 0; w < ctas[c]->warps.size(); ++w) {
      int done = 0;
      for (int t = 0; t < 32; ++t) done += fibers[c * block_threads + w * 32 + t]->done;
      std::printf("CTA %zu warp %zu: %d done, %d wait for the warp\n", c, w, done, ctas[c]->warps[w].arrived);
    }
  for (const auto& [place, barrier] : barriers)
    std::printf("barrier %p: %d of %d arrivals and %lld bytes to come in phase %llu\n", static_cast<void*>(place),
                barrier.pending, barrier.expected, static_cast<long long>(barrier.bytes),
                static_cast<unsigned long long>(barrier.phase));
  std::fflush(stdout);
  std::abort();
}

void run_cluster(int first_block, int threads) {
  barriers.clear();
  copies.clear();
  cluster = {};
  for (auto& one : ctas) {
    std::memset(one->shared, 0xff, kSharedBytes);
    one->warps.assign(threads / 32, Warp());
    one->barriers.clear();
  }
  const int count = threads * cluster_size;
  while (static_cast<int>(fibers.size()) < count) fibers.push_back(std::make_unique<Fiber>());
  for (int t = 0; t < count; ++t) {
    Fiber& fiber = *fibers[t];
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, begin, 0);
  }
  std::vector<int> order(count / 32);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  int left = count, idle = 0;
  while (left > 0) {
    progress = false;
    std::shuffle(order.begin(), order.end(), random_numbers);
    const size_t some = random_numbers() % order.size() + 1;
    for (size_t k = 0; k < some; ++k)
      for (int t = order[k] * 32; t < order[k] * 32 + 32; ++t) {
        if (fibers[t]->done) continue;
        current = t;
        threadIdx = dim3(static_cast<unsigned>(t % threads));
        const unsigned block = static_cast<unsigned>(first_block + t / threads);
        blockIdx = dim3(block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y);
        swapcontext(&scheduler, &fibers[t]->context);
        left -= fibers[t]->done;
      }
    if (!copies.empty() && random_numbers() % 3 == 0) land(random_numbers() % copies.size());
    idle = progress ? 0 : idle + 1;
    if (idle > kIdleRounds) report_deadlock(left);
  }
  if (!copies.empty()) {
    std::printf("CTAs have ended with %zu copies on their way\n", copies.size());
    std::abort();
  }
}

}  // namespace

void launch(dim3 grid, int threads, int cluster_of, std::function<void()> work) {
  if (const char* seed = std::getenv("EMULATION_SEED")) random_numbers.seed(static_cast<unsigned>(std::atoi(seed)));
  gridDim = grid;
  blockDim = dim3(static_cast<unsigned>(threads));
  body = &work;
  block_threads = threads;
  cluster_size = cluster_of;
  while (static_cast<int>(ctas.size()) < cluster_size) ctas.push_back(std::make_unique<Cta>());
  ctas.resize(cluster_size);
  std::vector<int> order(grid.x * grid.y * grid.z / cluster_size);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), random_numbers);
  for (const int index : order) run_cluster(index * cluster_size, threads);
}

uint8_t* shared_memory() { return cta().shared; }

uint64_t cluster_place(const void* pointer, int rank) {
  return reinterpret_cast<uint64_t>(ctas.at(rank)->shared + (static_cast<const uint8_t*>(pointer) - cta().shared));
}

void yield() { swapcontext(&fibers[current]->context, &scheduler); }

const uint64_t* warp_gather(uint64_t value) {
  Fiber& fiber = *fibers[current];
  Warp& warp = cta().warps[current % block_threads / 32];
  const uint64_t generation = warp.generation;
  warp.in[current % 32] = value;
  if (++warp.arrived == 32) {
    std::memcpy(warp.out, warp.in, sizeof warp.out);
    warp.arrived = 0;
    ++warp.generation;
    progress = true;
  } else {
    while (warp.generation == generation) yield();
  }
  // A copy of its own: other lanes may go on to the next gather before this one has read.
  std::memcpy(fiber.gathered, warp.out, sizeof fiber.gathered);
  return fiber.gathered;
}

void cta_barrier(int id, int threads) { meet(cta().barriers[id], threads); }

void cta_barrier_arrive(int id, int threads) { arrive(cta().barriers[id], threads); }

void cluster_barrier() { meet(cluster, block_threads * cluster_size); }

void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  barriers[barrier] = Barrier{static_cast<int>(arrivals), static_cast<int>(arrivals)};
}

void barrier_arrive(uint64_t* place) {
  Barrier& barrier = barriers.at(place);
  --barrier.pending;
  settle(barrier);
}

void barrier_expect(uint64_t* place, uint32_t bytes) {
  Barrier& barrier = barriers.at(place);
  barrier.bytes += bytes;
  --barrier.pending;
  settle(barrier);
}

bool barrier_passed(uint64_t* barrier, uint32_t parity) { return (barriers.at(barrier).phase & 1) != parity; }

void copy_later(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16 || bytes == 0) {
    std::printf("a bulk copy of %u bytes is not of whole, aligned pieces of 16\n", bytes);
    std::abort();
  }
  std::memset(to, 0xff, bytes);
  land_later([=] { std::memcpy(to, from, bytes); }, bytes, barrier);
}

void land_later(std::function<void()> land, uint32_t bytes, uint64_t* barrier) {
  copies.push_back({std::move(land), bytes, barrier});
  progress = true;
}

int cluster_rank() { return current / block_threads; }

void* fiber_local(void* (*make)()) {
  void*& local = fibers[current]->local;
  if (local == nullptr) local = make();
  return local;
}

void store_later(void* to, const void* value, uint32_t bytes, uint64_t* barrier) {
  const auto* first = static_cast<const uint8_t*>(value);
  land_later([to, copy = std::vector<uint8_t>(first, first + bytes)] { std::memcpy(to, copy.data(), copy.size()); },
             bytes, barrier);
}

}  // namespace emulation

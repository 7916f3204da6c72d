// Resources shared by Hopper's threads on the CPU: memory of threadblocks and clusters, the
// barriers in it, and named barriers.
//
// All threadblocks of a grid run concurrently. As in PTX, an address in shared memory is a 32-bit
// number: the threadblock's rank in its cluster from bit 24 on, the offset in its memory below.
#pragma once

#include <array>
#include <initializer_list>

namespace on_cpu {

struct Cta {
    unsigned char *memory = nullptr;
    std::size_t bytes = 0;
    std::array<Barrier, 16> named{};
    Barrier cluster_arrived; // used in the cluster's first threadblock only
};

struct Special {
    dim3 nclusterid, clusterid, cluster_ctaid, cluster_nctaid;
    unsigned cluster_ctarank = 0;
};

static std::vector<Cta> ctas;
static std::vector<Barrier> warpgroups;
static std::vector<unsigned> cluster_generation; // of each thread's last arrival
static Special special;
static unsigned cluster_size = 1;

inline Cta &here() { return ctas[current()]; }
inline Cta &peer(unsigned rank) { return ctas[current() / cluster_size * cluster_size + rank]; }

inline unsigned char *pointer(std::uint32_t address, std::size_t bytes = 1) {
    Cta &cta = peer(address >> 24);
    std::uint32_t const offset = address & 0xffffff;
    if (offset + bytes > cta.bytes) fail("an address outside shared memory");
    return cta.memory + offset;
}

inline std::uint32_t mapa(std::uint32_t address, std::uint32_t rank) { return (address & 0xffffff) | rank << 24; }

// mbarrier in eight bytes, as on the device (PTX ISA 9.7.13.15): a phase ends when all threads have
// arrived and all bytes have been transferred.
struct Mbarrier {
    std::int32_t bytes;
    std::uint16_t expected : 15, phase : 1;
    std::uint16_t pending;
};
static_assert(sizeof(Mbarrier) == 8);

inline Mbarrier &mbarrier(std::uint32_t address) {
    if (address % 8 != 0) fail("a barrier that is not aligned");
    return *reinterpret_cast<Mbarrier *>(pointer(address, 8));
}

inline void settle(Mbarrier &barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.phase ^= 1;
        barrier.pending = barrier.expected;
    }
}

inline void barrier_init(std::uint32_t address, std::uint32_t count) {
    auto const threads = static_cast<std::uint16_t>(count);
    mbarrier(address) = {0, threads, 0, threads};
}

inline void barrier_expect(std::uint32_t address, std::uint32_t bytes) { mbarrier(address).bytes += static_cast<std::int32_t>(bytes); }

inline void barrier_arrive(std::uint32_t address) {
    Mbarrier &barrier = mbarrier(address);
    if (barrier.pending-- == 0) fail("more arrive at a barrier than it waits for");
    settle(barrier);
}

inline void barrier_complete(std::uint32_t address, std::uint32_t bytes) {
    mbarrier(address).bytes -= static_cast<std::int32_t>(bytes);
    settle(mbarrier(address));
}

inline bool barrier_passed(std::uint32_t address, std::uint32_t parity) {
    if (mbarrier(address).phase != parity) return true;
    give_way();
    return mbarrier(address).phase != parity;
}

inline void barrier_wait(std::uint32_t address, std::uint32_t parity) {
    while (mbarrier(address).phase == parity) give_way();
}

inline Barrier &named(std::uint32_t id) {
    if (id >= 16) fail("a named barrier that there is not");
    return here().named[id];
}

inline void named_sync(std::uint32_t id, std::uint32_t threads) { wait(named(id), threads); }

inline void named_arrive(std::uint32_t id, std::uint32_t threads) {
    Barrier &barrier = named(id);
    if (++barrier.arrived == threads) barrier = {0, barrier.generation + 1};
}

inline void cluster_arrive() {
    Barrier &barrier = peer(0).cluster_arrived;
    cluster_generation[block.running] = barrier.generation;
    if (++barrier.arrived == cluster_size * block.size) barrier = {0, barrier.generation + 1};
}

inline void cluster_wait() {
    while (peer(0).cluster_arrived.generation == cluster_generation[block.running]) give_way();
}

// stmatrix, the inverse of ldmatrix. Lanes 8i to 8i+7 provide the addresses of the rows of matrix
// i, 16 bytes each.
template <bool transposed>
void stmatrix(std::uint32_t address, std::initializer_list<std::uint32_t> words) {
    auto const rows = exchange(address);
    unsigned const lane = threadIdx.x % 32;
    unsigned matrix = 0;
    for (std::uint32_t const word : words) {
        for (unsigned i = 0; i < 2; ++i) {
            unsigned const row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
            std::uint16_t const half = static_cast<std::uint16_t>(word >> 16 * i);
            std::memcpy(pointer(rows[8 * matrix + row] + 2 * column, 2), &half, 2);
        }
        ++matrix;
    }
}

} // namespace on_cpu

inline std::uint32_t __cvta_generic_to_shared(void const *generic) {
    auto const offset = static_cast<unsigned char const *>(generic) - on_cpu::here().memory;
    if (offset < 0 || static_cast<std::size_t>(offset) > on_cpu::here().bytes) on_cpu::fail("no address in shared memory");
    return static_cast<std::uint32_t>(offset) | on_cpu::special.cluster_ctarank << 24;
}

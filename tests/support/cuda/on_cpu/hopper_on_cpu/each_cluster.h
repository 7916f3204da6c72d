// Runs a kernel of CUTLASS 3.x. All threadblocks of its grid run concurrently, since threadblocks
// of a cluster, or of a stream-K tile, wait for each other.
#pragma once

namespace on_cpu {

template <class Kernel, class Cluster>
void each_cluster(typename Kernel::Params const &params, Cluster) {
    dim3 const cluster(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), cute::size<2>(Cluster{}));
    dim3 const grid = Kernel::get_grid_shape(params), threads = Kernel::get_block_shape();
    if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z) fail("clusters do not divide the grid");
    cluster_size = cluster.x * cluster.y * cluster.z;
    gridDim = grid;
    special.nclusterid = dim3(grid.x / cluster.x, grid.y / cluster.y, grid.z / cluster.z);
    special.cluster_nctaid = cluster;
    unsigned const count = grid.x * grid.y * grid.z;
    constexpr std::size_t bytes = Kernel::SharedStorageSize, room = (bytes + 1023) / 1024 * 1024;
    // NaN in every float format, to detect reads of unwritten memory.
    std::vector<unsigned char> memory(count * room + 1024, 0xff);
    auto const start = (reinterpret_cast<std::uintptr_t>(memory.data()) + 1023) / 1024 * 1024;
    ctas.assign(count, Cta{});
    warpgroups.assign(count * threads.x / 128, Barrier{});
    cluster_generation.assign(count * threads.x, 0);
    for (unsigned i = 0; i < count; ++i) {
        ctas[i].memory = reinterpret_cast<unsigned char *>(start) + i * room;
        ctas[i].bytes = bytes;
    }
    auto const enter = [&](unsigned number) {
        unsigned const rank = number % cluster_size, which = number / cluster_size;
        dim3 const &clusters = special.nclusterid;
        special.cluster_ctarank = rank;
        special.cluster_ctaid = dim3(rank % cluster.x, rank / cluster.x % cluster.y, rank / (cluster.x * cluster.y));
        special.clusterid = dim3(which % clusters.x, which / clusters.x % clusters.y, which / (clusters.x * clusters.y));
        blockIdx = uint3{
            special.clusterid.x * cluster.x + special.cluster_ctaid.x, special.clusterid.y * cluster.y + special.cluster_ctaid.y,
            special.clusterid.z * cluster.z + special.cluster_ctaid.z};
    };
    run(threads.x, [&] { Kernel{}(params, reinterpret_cast<char *>(here().memory)); }, count, enter);
}

} // namespace on_cpu

// Free list of scratch buffers, shared by all threads.

#include "gemm/workspace.h"

#include <cstdlib>
#include <mutex>
#include <new>

namespace qsync {
namespace {

constexpr std::size_t PIECES = 4, UNIT = std::size_t{1} << 16, LARGEST_KEPT = std::size_t{1} << 27;

struct Piece {
    std::byte *at = nullptr;
    std::size_t bytes = 0;
};

// Never destroyed: threads may still run when the process exits.
struct Kept {
    std::mutex lock;
    Piece pieces[PIECES];
};

Kept &kept() {
    static Kept *const pieces = new Kept;
    return *pieces;
}

} // namespace

Workspace::Workspace(std::size_t bytes) : at_(nullptr), bytes_((bytes + UNIT) / UNIT * UNIT) {
    {
        const std::lock_guard<std::mutex> held(kept().lock);
        Piece *best = nullptr;
        for (Piece &piece : kept().pieces)
            if (piece.bytes >= bytes_ && (best == nullptr || piece.bytes < best->bytes)) best = &piece;
        if (best != nullptr) {
            at_ = best->at;
            bytes_ = best->bytes;
            *best = Piece();
        }
    }
    if (at_ == nullptr) at_ = static_cast<std::byte *>(std::aligned_alloc(64, bytes_));
    if (at_ == nullptr) throw std::bad_alloc();
}

Workspace::~Workspace() {
    if (bytes_ <= LARGEST_KEPT) {
        const std::lock_guard<std::mutex> held(kept().lock);
        Piece *least = &kept().pieces[0];
        for (Piece &piece : kept().pieces)
            if (piece.bytes < least->bytes) least = &piece;
        if (least->bytes < bytes_) {
            std::byte *const old = least->at;
            *least = {at_, bytes_};
            at_ = old;
        }
    }
    std::free(at_);
}

} // namespace qsync

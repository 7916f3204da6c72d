/* Hooks and device guard that torch's CPU build lacks to trace fake tensors on a CUDA device,
   forward and backward. Loaded before torch is imported, which queries hooks once. */
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isAvailable() const override { return true; }
    bool isBuilt() const override { return true; }
    bool hasPrimaryContext(at::DeviceIndex) const override { return false; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// One device with one stream, which stays empty.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::Device const device{c10::DeviceType::CUDA, 0};

    c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
    c10::Device exchangeDevice(c10::Device) const override { return device; }
    c10::Device getDevice() const override { return device; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void **, c10::Stream const &, c10::DeviceIndex, c10::EventFlag) const override {}
    void block(void *, c10::Stream const &) const override {}
    bool queryEvent(void *) const override { return true; }
    void destroyEvent(void *, c10::DeviceIndex) const noexcept override {}
};

} // namespace

namespace at {
// The registry's key is the class name.
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
} // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

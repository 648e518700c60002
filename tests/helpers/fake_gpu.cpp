// Lets a build of torch without CUDA run autograd on fake tensors whose device is a GPU (see fake_gpu.py). Loaded before torch, so
// that its two functions take the place of torch's own. Torch does the same in a build with CUDA on a machine without a GPU
// (torch._C._ensureCUDADeviceGuardSet). Nothing computes: there is one device, one stream, and events are done at once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

using namespace c10;

struct Guard : impl::NoOpDeviceGuardImpl<kCUDA> {
  Device getDevice() const override { return Device(kCUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, Device(kCUDA, 0)); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, Device(kCUDA, 0)); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
static impl::DeviceGuardImplRegistrar registrar(kCUDA, new Guard());

struct Hooks : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

namespace at::detail {
__attribute__((visibility("default"))) const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
}  // namespace at::detail

namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<DeviceType> getAccelerator(bool) { return kCUDA; }
}  // namespace at::accelerator

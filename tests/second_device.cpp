// A device that is not the CPU but computes on it, for tests/test_second_device.py. As on a GPU, an
// operation on tensors of both devices is an error.

#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ------------------------------------------------------------ one device with one stream

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
};

struct HostAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
HostAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// ------------------------------------------------------------ tensors

Tensor empty(
    IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
    optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device>, optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) {
    at::native::resize_(target, source.sizes(), std::nullopt);
  }
  return copy_from(source, target, false);
}

Tensor as_strided(
    const Tensor& tensor, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

const Tensor& resize(const Tensor& tensor, IntArrayRef size, optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups) {
  optional<Tensor> b;
  if (bias && bias->defined()) {
    b = on_host(*bias);
  }
  return at::convolution(
             on_host(x), on_host(weight), b, stride, padding, dilation, transposed,
             output_padding, groups)
      .to(kDevice);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const int64_t outputs = gradient.size(1);
  auto [of_x, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(x), on_host(weight), IntArrayRef(outputs), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  auto moved = [](const Tensor& t) { return t.defined() ? t.to(kDevice) : t; };
  return {moved(of_x), moved(of_weight), moved(of_bias)};
}

// ------------------------------------------------------------ all other operations

// These may take tensors of the CPU on a GPU too: indices, and copies between devices.
const std::unordered_set<std::string> kMixed = {
    "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
    "aten::index.Tensor_out", "aten::_to_copy"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::string name = schema.name();
  if (!schema.overload_name().empty()) {
    name += "." + schema.overload_name();
  }
  if (!kMixed.count(name) && !kMixed.count(schema.name())) {
    const auto arguments = torch::jit::last(*stack, schema.arguments().size());
    auto check = [&](const Tensor& tensor) {
      TORCH_CHECK(
          !tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0,
          "Expected all tensors to be on the same device, but ", name,
          " got a tensor of the CPU with shape ", tensor.sizes());
    };
    for (const auto& argument : arguments) {
      if (argument.isTensor()) {
        check(argument.toTensor());
      } else if (argument.isTensorList()) {
        for (const Tensor& tensor : argument.toTensorVector()) {
          check(tensor);
        }
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("as_strided", &as_strided);
  library.impl("resize_", &resize);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

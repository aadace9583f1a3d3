// A CUDA device that is not there, for a CPU build of torch: tensors whose device is cuda:0 and whose memory is the
// host's. Every operation runs on the CPU, after the checks that a real one would make: all tensors on one device (a
// number, a CPU tensor without dimensions, may stand beside them where torch's kernels take one). New memory is full of
// 0xFF: NaN in every float. What waits for the device is counted, and refused while a graph is recorded.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/resize_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {
using c10::Device;
using c10::DeviceType;
using c10::Stream;

const Device DEVICE(DeviceType::CUDA, 0);

std::mutex mutex;
std::map<std::string, int64_t> syncs;
std::map<std::string, int64_t> seen;
std::set<void*> pinned;
thread_local bool is_capturing = false;
thread_local int inside = 0;  // of an operation that runs on the host: its own copies are no waits
int64_t bytes_now = 0, bytes_most = 0;

// Copies to pinned memory that nobody has waited for: the host still reads 0xFF there.
struct Late {
  int64_t number;
  at::Tensor to, value;
};
auto& late = *new std::vector<Late>();  // never destroyed: its tensors would outlive their allocator
int64_t num_late = 0;

void arrive(int64_t until) {
  std::vector<Late> arrived;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto first = std::stable_partition(late.begin(), late.end(), [&](const Late& copy) { return copy.number > until; });
    arrived.assign(first, late.end());
    late.erase(first, late.end());
  }
  for (auto& copy : arrived) copy.to.copy_(copy.value);
}

void noteSync(const std::string& what, int64_t until = INT64_MAX) {
  if (inside) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    ++syncs[what];
  }
  arrive(until);
  TORCH_CHECK(!is_capturing, "CUDA error: operation not permitted when stream is capturing (pretended: ", what, ")");
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Block { void* data; size_t size; };

void freeBlock(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(mutex);
    bytes_now -= static_cast<int64_t>(block->size);
  }
  std::free(block->data);
  delete block;
}

struct DeviceAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, DEVICE};
    void* data = std::aligned_alloc(512, (size + 511) / 512 * 512);
    TORCH_CHECK(data != nullptr, "CUDA out of memory (pretended)");
    if (size < (64u << 20)) std::memset(data, 0xFF, size);
    std::lock_guard<std::mutex> lock(mutex);
    bytes_now += static_cast<int64_t>(size);
    bytes_most = std::max(bytes_most, bytes_now);
    return {data, new Block{data, size}, &freeBlock, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
DeviceAllocator device_allocator;

void freePinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(data);
  }
  std::free(data);
}

struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, Device(DeviceType::CPU)};
    void* data = std::aligned_alloc(512, (size + 511) / 512 * 512);
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(data);
    return {data, data, &freePinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freePinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
PinnedAllocator pinned_allocator;

bool isPinned(const at::Tensor& x) {
  std::lock_guard<std::mutex> lock(mutex);
  return x.has_storage() && pinned.count(const_cast<void*>(x.storage().data())) > 0;
}

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    return pinned.count(const_cast<void*>(data)) > 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(Device(DeviceType::CPU));
  }
};

at::Tensor hostAlias(const at::Tensor& x) {  // the same memory, on the CPU
  auto storage = x.storage();
  return at::for_blob(static_cast<char*>(const_cast<void*>(storage.data())) + x.storage_offset() * x.itemsize(), x.sizes())
      .strides(x.strides())
      .options(x.options().device(at::kCPU))
      .deleter([x](void*) {})
      .target_device(Device(DeviceType::CPU))
      .make_tensor();
}

at::Tensor onCpu(const at::Tensor& x) { return x.is_cuda() ? (x.numel() ? hostAlias(x) : at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kCPU))) : x; }

at::Tensor emptyMemoryFormat(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                             std::optional<Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor emptyStrided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor& copyInto(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  TORCH_CHECK(self.device().type() == DeviceType::CUDA || self.device().is_cpu(), "copy to ", self.device());
  if (source.numel() && self.device() != source.device()) {
    const bool waits = source.is_cuda() ? !(non_blocking && isPinned(self)) : !(non_blocking && isPinned(source));
    // A copy from pageable memory is staged: of the host it asks no waiting, but a graph cannot hold it.
    if (waits) noteSync(source.is_cuda() ? "copy to the host" : "copy from pageable memory");
    TORCH_CHECK(inside || !is_capturing || source.is_cuda(), "a recorded copy from the host (pretended)");
    if (source.is_cuda() && !waits && !inside && !is_capturing && self.is_non_overlapping_and_dense()) {
      const at::Tensor value = onCpu(source).clone();
      memset(self.data_ptr(), 0xFF, self.nbytes());
      std::lock_guard<std::mutex> lock(mutex);
      late.push_back({++num_late, self, value});
      return self;
    }
  }
  auto to = onCpu(self);
  to.copy_(onCpu(source));
  return self;
}

at::Tensor copyFromAndResize(const at::Tensor& source, const at::Tensor& self) {
  if (self.sizes() != source.sizes()) self.resize_(source.sizes());
  at::Tensor to = onCpu(self);
  to.copy_(onCpu(source));
  return self;
}

at::Scalar localScalar(const at::Tensor& self) {
  noteSync("item");
  return at::_local_scalar_dense(onCpu(self));
}

// Operators that wait for the device: the size of what they return depends on its numbers.
const std::set<std::string> WAITING = {
    "aten::nonzero", "aten::unique", "aten::_unique2", "aten::_unique", "aten::unique_consecutive", "aten::unique_dim",
    "aten::masked_select", "aten::equal", "aten::repeat_interleave", "aten::bincount", "aten::linalg_lstsq",
    "aten::histogram", "aten::_linalg_check_errors", "aten::is_nonzero"};

// Operators whose tensors may lie on different devices, beside those that take a CPU number.
const std::set<std::string> MIXING = {"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put",
                                      "aten::copy_", "aten::set_"};

const std::set<std::string> NUMBERS = {"aten::fill_", "aten::fill", "aten::masked_fill", "aten::masked_fill_",
                                       "aten::index_fill_", "aten::index_fill", "aten::floor_divide",
                                       "aten::floor_divide_"};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto num_args = schema.arguments().size();
  const auto begin = stack->size() - num_args;
  const bool takes_numbers = op.hasTag(at::Tag::pointwise) || MIXING.count(name) || NUMBERS.count(name);
  std::vector<at::Tensor> tensors;
  std::string dtypes;
  bool waits = WAITING.count(name) > 0;
  for (size_t at = 0; at < num_args; ++at) {
    const auto& value = (*stack)[begin + at];
    std::vector<at::Tensor> own;
    if (value.isTensor()) own = {value.toTensor()};
    else if (value.isTensorList()) own = value.toTensorVector();
    else if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorVector()) { if (each.has_value()) own.push_back(*each); }
    for (const auto& x : own) {
      if (!x.defined()) continue;
      if (dtypes.size() < 60) dtypes += std::string(dtypes.empty() ? "" : ",") + c10::toString(x.scalar_type());
      if (!x.is_cuda()) {
        const bool is_number = x.dim() == 0 && x.device().is_cpu();
        const bool is_index = MIXING.count(name) && at > 0;
        const bool is_wrapped = is_number && x.unsafeGetTensorImpl()->is_wrapped_number();
        TORCH_CHECK((takes_numbers && is_number) || is_index || is_wrapped,
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ", x.device(),
                    "! (when checking argument for argument ", schema.arguments()[at].name(), " in ", name, ": ", x.sizes(), ")");
        if (!is_number) waits = true;  // an index from the host
      } else if (MIXING.count(name) && at > 0 && x.scalar_type() == at::kBool && x.dim() > 0) {
        waits = true;  // a mask is turned into indices
      }
      tensors.push_back(x);
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    ++seen[name + "." + schema.overload_name() + "|" + dtypes];
  }
  if (waits) noteSync(name);
  struct Inside { Inside() { ++inside; } ~Inside() { --inside; } } guard;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

const at::Tensor& resizeOwn(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor asStrided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor viewOwn(const at::Tensor& self, c10::SymIntArrayRef size) { return at::cpu::view_symint(self, size); }
at::Tensor reshapeAlias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& setStorage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
// Float32 products as a GPU's SIMT kernels sum them: one multiply-add after the other, over all of K (cuBLAS without
// TF32 and without split K). PRETENDED_SEQUENTIAL=1.
bool isSequential() {
  static const bool is = std::getenv("PRETENDED_SEQUENTIAL") != nullptr;
  return is;
}
void sumUp(const float* a, const float* b, float* c, int64_t m, int64_t k, int64_t n) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t l = 0; l < k; ++l) {
      const float x = a[i * k + l];
      for (int64_t j = 0; j < n; ++j) c[i * n + j] = __builtin_fmaf(x, b[l * n + j], c[i * n + j]);
    }
}
at::Tensor mmOwn(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.is_cuda() && b.is_cuda(), "Expected all tensors to be on the same device (pretended: mm)");
  struct Inside { Inside() { ++inside; } ~Inside() { --inside; } } guard;
  auto x = onCpu(a), y = onCpu(b);
  if (!isSequential() || a.scalar_type() != at::kFloat || a.size(1) < 32) return at::mm(x, y).to(DEVICE);
  x = x.contiguous(), y = y.contiguous();
  auto out = at::zeros({x.size(0), y.size(1)}, x.options());
  sumUp(x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), x.size(0), x.size(1), y.size(1));
  return out.to(DEVICE);
}
at::Tensor mmWide(const at::Tensor& a, const at::Tensor& b, at::ScalarType out_dtype) {  // exact products, one rounding
  TORCH_CHECK(a.is_cuda() && b.is_cuda(), "Expected all tensors to be on the same device (pretended: mm)");
  struct Inside { Inside() { ++inside; } ~Inside() { --inside; } } guard;
  return at::mm(onCpu(a).to(at::kDouble), onCpu(b).to(at::kDouble)).to(out_dtype).to(DEVICE);
}
template <at::Tensor (*own)(const at::Tensor&, int64_t, bool)>
at::Tensor softmaxOwn(const at::Tensor& self, int64_t dim, bool half_to_float) {
  struct Inside { Inside() { ++inside; } ~Inside() { --inside; } } guard;  // CUDA's widens 16 bits by itself
  auto x = onCpu(self);
  return own(half_to_float ? x.to(at::kFloat) : x, dim, false).to(DEVICE);
}
at::Tensor histcOwn(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  struct Inside { Inside() { ++inside; } ~Inside() { --inside; } } guard;  // CUDA's takes integers, the CPU's does not
  return at::histc(onCpu(self).to(at::kDouble), bins, low, high).to(self.scalar_type()).to(DEVICE);
}
int64_t sdpChoice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return 0;  // plain operations
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &emptyMemoryFormat);
  m.impl("empty_strided", &emptyStrided);
  m.impl("copy_", &copyInto);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("_local_scalar_dense", &localScalar);
  m.impl("resize_", &resizeOwn);
  m.impl("as_strided", &asStrided);
  m.impl("view", &viewOwn);
  m.impl("_reshape_alias", &reshapeAlias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &setStorage);
  m.impl("_fused_sdp_choice", &sdpChoice);
  m.impl("histc", &histcOwn);
  m.impl("mm", &mmOwn);
  m.impl("mm.dtype", &mmWide);
  m.impl("_softmax", &softmaxOwn<&at::_softmax>);
  m.impl("_log_softmax", &softmaxOwn<&at::_log_softmax>);
}

at::Tensor emptyCpu(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  if (!pin.value_or(false)) return at::detail::empty_cpu(size, c10::dtype_or_default(dtype), false, format);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::detail::empty_generic(size, &pinned_allocator, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor emptyStridedCpu(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<Device>, std::optional<bool> pin) {
  if (!pin.value_or(false)) return at::detail::empty_strided_cpu(size, stride, c10::dtype_or_default(dtype), false);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::detail::empty_strided_generic(size, stride, &pinned_allocator, keys, c10::dtype_or_default(dtype));
}
bool isPinnedCpu(const at::Tensor& self, std::optional<Device>) { return isPinned(self); }
at::Tensor pinMemory(const at::Tensor& self, std::optional<Device>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  at::Tensor copy = at::detail::empty_generic(self.sizes(), &pinned_allocator, keys, self.scalar_type(), std::nullopt);
  return copy.copy_(self);
}
bool isPinnedCuda(const at::Tensor&, std::optional<Device>) { return false; }
at::Tensor pinMemoryCuda(const at::Tensor& self, std::optional<Device>) {
  TORCH_CHECK(false, "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned");
}
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("empty.memory_format", &emptyCpu);
  m.impl("empty_strided", &emptyStridedCpu);
  m.impl("is_pinned", &isPinnedCpu);
  m.impl("pin_memory", &pinMemory);
  m.impl("_pin_memory", &pinMemory);
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("is_pinned", &isPinnedCuda);
  m.impl("pin_memory", &pinMemoryCuda);
}

TORCH_LIBRARY(pretended_gpu, m) {
  m.def("capture(bool on) -> ()", [](bool on) { is_capturing = on; });
  m.def("is_capturing() -> bool", []() { return is_capturing; });
  m.def("memory() -> int[]", []() { std::lock_guard<std::mutex> lock(mutex); return std::vector<int64_t>{bytes_now, bytes_most}; });
  m.def("reset_peak() -> ()", []() { std::lock_guard<std::mutex> lock(mutex); bytes_most = bytes_now; });
  m.def("alias(Tensor x) -> Tensor", [](const at::Tensor& x) { return onCpu(x); });
  m.def("syncs() -> str[]", []() { std::lock_guard<std::mutex> lock(mutex); std::vector<std::string> all; for (auto& e : syncs) all.push_back(std::to_string(e.second) + " " + e.first); return all; });
  m.def("num_late() -> int", []() { std::lock_guard<std::mutex> lock(mutex); return num_late; });
  m.def("wait(str what, int until) -> ()", [](std::string what, int64_t until) { noteSync(what, until); });
  m.def("arrive() -> ()", []() { arrive(INT64_MAX); });
  m.def("reset_syncs() -> ()", []() { std::lock_guard<std::mutex> lock(mutex); syncs.clear(); });
  m.def("seen() -> str[]", []() { std::lock_guard<std::mutex> lock(mutex); std::vector<std::string> all; for (auto& e : seen) all.push_back(std::to_string(e.second) + " " + e.first); return all; });
  m.def("install() -> ()", []() { c10::SetAllocator(DeviceType::CUDA, &device_allocator, 100); });
}
}  // namespace
namespace at { using ::Hooks; REGISTER_CUDA_HOOKS(Hooks); }

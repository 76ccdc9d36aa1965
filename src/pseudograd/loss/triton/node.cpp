// The most common calls of the loss on a GPU, as an autograd node in C++.
//
// Launching our kernels takes a few microseconds; a backward pass in Python takes a hundred, more
// than all of F.cross_entropy. So node.py compiles this file against the installed PyTorch. Eq. 5 is
// not in here: a `Plan`, made by node.py, says which compiled kernels to launch with which arguments.
// operators.py does the same in Python, and handles all other calls.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Functions of the CUDA driver. node.py looks them up, so compiling this file does not need CUDA.
using CuLaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, void* stream, void** parameters, void** extra);
using CuCtxSetCurrent = int (*)(void* context);
CuLaunchKernel launch_kernel = nullptr;
CuCtxSetCurrent set_context = nullptr;
std::string no_second_derivative, no_forward_mode;

// The tensors that kernels read and write; node.py has the same list.
enum Slot { Z, TARGET, KS, VALUE, GRADIENT, PARTS, VALUES, FOUND, GRAD, FLAG, SLOTS };
using Addresses = std::array<int64_t, SLOTS>;
using OptionalTensor = std::optional<at::Tensor>;

int64_t address_of(const at::Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<int64_t>(tensor.data_ptr()) : 0;
}

// The launch of one kernel. Arguments take eight bytes each, of which the kernel reads as many as it
// needs; node.py fills in those that never change.
struct Launch {
  int64_t function;
  unsigned programs, threads, shared_bytes;
  std::vector<int64_t> arguments;
  std::vector<std::pair<size_t, size_t>> places;  // indices of arguments, and their slots
  int64_t k_at;                                   // -1 if the kernel does not need k

  void operator()(const Addresses& addresses, float k, int64_t stream) const {
    auto values = arguments;
    for (auto [at, slot] : places) values[at] = addresses[slot];
    if (k_at >= 0) std::memcpy(&values[k_at], &k, sizeof k);
    std::vector<void*> parameters;
    parameters.reserve(values.size());
    for (auto& value : values) parameters.push_back(&value);
    int error = launch_kernel(reinterpret_cast<void*>(function), programs, 1, 1, threads, 1, 1,
                              shared_bytes, reinterpret_cast<void*>(stream), parameters.data(),
                              nullptr);
    TORCH_CHECK(!error, "pseudograd: CUDA error ", error, " while launching a kernel");
  }
};

// The launches and buffers for calls of one layout.
struct Plan {
  int64_t context;  // the device's, which a thread of the autograd engine has to set
  std::vector<Launch> forward, backward;  // no backward launches: not differentiable
  at::ScalarType dtype;
  std::optional<at::ScalarType> gradient;  // its dtype, if the forward pass computes it
  int64_t parts, values, found;            // sizes; 0 if not needed
  int64_t dims;  // of the result, the first of the logits' dimensions; 0 if the loss is reduced

  at::IntArrayRef shape(const at::Tensor& z) const { return z.sizes().slice(0, dims); }
};

void launch_all(const Plan& plan, const std::vector<Launch>& launches, const Addresses& addresses,
                double k, int64_t stream) {
  int error = set_context(reinterpret_cast<void*>(plan.context));
  TORCH_CHECK(!error, "pseudograd: CUDA error ", error, " while setting the context");
  for (auto& launch : launches) launch(addresses, static_cast<float>(k), stream);
}

// What a forward pass saves for its backward pass, besides the caller's tensors.
struct State : torch::CustomClassHolder {
  std::shared_ptr<const Plan> plan;
  at::Tensor gradient, parts, found, flag;
  double k;
  int64_t stream;  // the engine runs a backward pass on the stream of its forward pass
};

at::Tensor run_forward(const at::Tensor& z, const at::Tensor& target, const OptionalTensor& ks,
                       State& state) {
  auto& plan = *state.plan;
  auto options = z.options().requires_grad(false);
  auto value = at::empty(plan.shape(z), options.dtype(plan.dtype));
  at::Tensor values;
  if (plan.parts) state.parts = at::empty({plan.parts}, options.dtype(at::kDouble));
  if (plan.values) values = at::empty({plan.values}, options.dtype(at::kDouble));
  if (plan.gradient) state.gradient = at::empty(z.sizes(), options.dtype(*plan.gradient));
  if (plan.found) state.found = at::empty({plan.found}, options.dtype(at::kFloat));
  Addresses addresses{};
  addresses[Z] = address_of(z);
  addresses[TARGET] = address_of(target);
  addresses[KS] = ks ? address_of(*ks) : 0;
  addresses[VALUE] = address_of(value);
  addresses[GRADIENT] = address_of(state.gradient);
  addresses[PARTS] = address_of(state.parts);
  addresses[VALUES] = address_of(values);
  addresses[FOUND] = address_of(state.found);
  launch_all(plan, plan.forward, addresses, state.k, state.stream);
  return value;
}

// Returns the gradient times the upstream gradient. If that is 1, the kernel keeps a gradient from the
// forward pass; otherwise it recomputes the gradient, so that it is rounded only once.
at::Tensor run_backward(const variable_list& saved, const at::Tensor& grad, State& state,
                        bool is_kept) {
  auto options = saved[0].options().requires_grad(false);
  auto& plan = *state.plan;
  bool is_batch = !grad.has_storage();  // a vmapped batch, which kernels cannot read
  auto upstream = is_batch ? at::ones(plan.shape(saved[0]), options.dtype(plan.dtype)) : grad;
  upstream = upstream.contiguous();                            // that of a sum is expanded
  if (address_of(upstream) % 16) upstream = upstream.clone();  // the compiled kernel may rely on alignment
  at::Tensor out;
  if (!state.gradient.defined()) {
    out = at::empty(saved[0].sizes(), options);
  } else {
    out = is_kept || is_batch ? state.gradient.clone() : std::move(state.gradient);
  }
  Addresses addresses{};
  addresses[Z] = address_of(saved[0]);
  addresses[TARGET] = address_of(saved[1]);
  addresses[KS] = address_of(saved[2]);
  addresses[GRADIENT] = address_of(out);
  addresses[PARTS] = address_of(state.parts);
  addresses[FOUND] = address_of(state.found);
  addresses[GRAD] = address_of(upstream);
  addresses[FLAG] = address_of(state.flag);
  launch_all(plan, plan.backward, addresses, state.k, state.stream);
  if (!is_batch) return out;
  auto factor = grad;
  if (plan.dims) {
    for (auto dim = plan.dims; dim < out.dim(); ++dim) factor = factor.unsqueeze(-1);
  }
  return at::where(out.eq(0).logical_or(factor.eq(0)), 0, out.mul(factor)).to(out.scalar_type());
}

struct TunableCrossEntropy : torch::autograd::Function<TunableCrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& z, const at::Tensor& target,
                            const OptionalTensor& ks, const c10::intrusive_ptr<State>& state) {
    ctx->save_for_backward({z, target, ks.value_or(at::Tensor())});
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    return run_forward(z, target, ks, *state);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto saved = ctx->get_saved_variables();  // raises if the graph has been freed
    auto state = c10::static_intrusive_pointer_cast<State>(ctx->saved_data["state"].toCapsule());
    bool is_differentiated = at::GradMode::is_enabled();
    bool is_kept = is_differentiated || torch::autograd::get_current_graph_task_keep_graph();
    auto out = run_backward(saved, grads[0], *state, is_kept);
    if (is_differentiated) {
      torch::autograd::DelayedError refusal(no_second_derivative, 2);
      out = refusal.apply({out, saved[0]})[0];
    }
    return {out, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

c10::intrusive_ptr<State> state_of(const std::shared_ptr<Plan>& plan, double k, int64_t stream) {
  auto state = c10::make_intrusive<State>();
  state->plan = plan;
  state->k = k;
  state->stream = stream;
  return state;
}

// Returns the loss of logits (R, C) for labels (R) or probabilities (R, C), or of binary logits for
// targets of the same shape.
at::Tensor loss(const std::shared_ptr<Plan>& plan, const at::Tensor& z, const at::Tensor& target,
                const OptionalTensor& ks, double k, const OptionalTensor& flag, int64_t stream) {
  TORCH_CHECK(!torch::autograd::isFwGradDefined(z), no_forward_mode);
  auto state = state_of(plan, k, stream);
  state->flag = flag.value_or(at::Tensor());
  if (plan->backward.empty()) return run_forward(z, target, ks, *state);
  return TunableCrossEntropy::apply(z, target, ks, state);
}

// The operators `pseudograd::loss_on_gpu` and `gradient_on_gpu` of compiled graphs, which graph.py defines
// and implements in Python. Both find the plan here by the layout of a call; Python makes plans, and
// computes what has none.
using Layout = std::vector<int64_t>;
using CurrentStream = int (*)(int32_t device, void** stream);
constexpr size_t MOST_PLANS = 4096;  // as in node.py
CurrentStream current_stream = nullptr;
int64_t parts_in_graph = 0;  // the size of `Plan::parts`
// These are never freed, since the interpreter may end before them.
PyObject *make_plan = nullptr, *loss_in_python = nullptr, *gradient_in_python = nullptr;
torch::Library* library = nullptr;
std::map<Layout, std::shared_ptr<Plan>> plans;
std::mutex of_plans;

int64_t bits(double number) {
  int64_t same;
  std::memcpy(&same, &number, sizeof same);
  return same;
}

void add_layout(Layout& layout, const at::Tensor& tensor) {
  layout.push_back(static_cast<int64_t>(tensor.scalar_type()));
  layout.push_back(tensor.dim());
  for (auto size : tensor.sizes()) layout.push_back(size);
  for (auto stride : tensor.strides()) layout.push_back(stride);
}

// Returns whether the kernels can read tensors as they are, on the device that is current.
bool are_plain(const at::Tensor& z, const at::Tensor& target, const OptionalTensor& ks) {
  auto address = address_of(z) | address_of(target) | (ks ? address_of(*ks) : 0);
  if (address % 16 || z.is_neg() || target.is_neg()) return false;
  if (target.device() != z.device() || (ks && ks->device() != z.device())) return false;
  return c10::impl::VirtualGuardImpl(z.device().type()).getDevice().index() == z.device().index();
}

// A call of either operator, as far as its plan depends on it.
struct GraphCall {
  const at::Tensor &z, &target;
  double k;
  const OptionalTensor& ks;
  int64_t ignore_index;
  std::string_view reduction;
  double smoothing;
  bool training;

  py::object sensitivity() const { return ks ? py::cast(*ks) : py::cast(k); }
  py::str reduction_name() const { return py::str(reduction.data(), reduction.size()); }

  // Returns the plan, or null if Python has to compute the call.
  std::shared_ptr<Plan> plan() const {
    if (!are_plain(z, target, ks)) return nullptr;
    bool special = k == 0.5 || k == 1 || k == 2;  // these have kernels of their own
    Layout layout{z.device().index(), ignore_index, bits(smoothing), training, reduction[0],
                  !ks && special ? bits(k) : 0};
    add_layout(layout, z);
    add_layout(layout, target);
    if (ks) add_layout(layout, *ks);
    {
      std::lock_guard<std::mutex> lock(of_plans);
      if (auto found = plans.find(layout); found != plans.end()) return found->second;
    }
    std::shared_ptr<Plan> made;
    {
      py::gil_scoped_acquire gil;
      auto call = py::reinterpret_borrow<py::object>(make_plan);
      made = call(z, target, sensitivity(), ignore_index, reduction_name(), smoothing, training)
                 .cast<std::shared_ptr<Plan>>();  // may be None
    }
    std::lock_guard<std::mutex> lock(of_plans);
    if (plans.size() >= MOST_PLANS) plans.clear();
    if (made) plans[layout] = made;
    return made;
  }

  c10::intrusive_ptr<State> state(const std::shared_ptr<Plan>& plan) const {
    void* stream = nullptr;
    TORCH_CHECK(!current_stream(z.device().index(), &stream), "pseudograd: no CUDA stream");
    return state_of(plan, k, reinterpret_cast<int64_t>(stream));
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> loss_on_gpu(
    const at::Tensor& z, const at::Tensor& target, double k, const OptionalTensor& ks,
    int64_t ignore_index, std::string_view reduction, double smoothing, bool training) {
  GraphCall call{z, target, k, ks, ignore_index, reduction, smoothing, training};
  auto plan = call.plan();
  if (!plan) {
    py::gil_scoped_acquire gil;
    auto function = py::reinterpret_borrow<py::object>(loss_in_python);
    return function(z, target, call.sensitivity(), ignore_index, call.reduction_name(), smoothing, training)
        .cast<std::tuple<at::Tensor, at::Tensor, at::Tensor>>();
  }
  auto state = call.state(plan);
  auto value = run_forward(z, target, ks, *state);
  // The compiler expects the same sizes of every plan; operators.py has them too.
  auto sized = [&](const at::Tensor& buffer, int64_t size, at::ScalarType dtype) {
    return training && buffer.defined() ? buffer : at::empty({training ? size : 0}, z.options().dtype(dtype));
  };
  return {value, sized(state->parts, parts_in_graph, at::kDouble),
          sized(state->found, 3 * z.size(0), at::kFloat)};
}

at::Tensor gradient_on_gpu(const at::Tensor& z, const at::Tensor& target, double k, const OptionalTensor& ks,
                           const at::Tensor& parts, const at::Tensor& found, const at::Tensor& grad,
                           int64_t ignore_index, std::string_view reduction, double smoothing) {
  GraphCall call{z, target, k, ks, ignore_index, reduction, smoothing, true};
  auto plan = call.plan();
  if (!plan) {
    py::gil_scoped_acquire gil;
    auto function = py::reinterpret_borrow<py::object>(gradient_in_python);
    return function(z, target, call.sensitivity(), parts, found, grad, ignore_index, call.reduction_name(),
                    smoothing)
        .cast<at::Tensor>();
  }
  auto state = call.state(plan);
  state->parts = parts;
  state->found = found;
  return run_backward({z, target, ks.value_or(at::Tensor())}, grad, *state, false);
}

// Makes this file run the operators for a dispatch key; "" gives them back to Python.
void run_operators(const std::string& key, int64_t stream, int64_t parts, const py::object& make,
                   const py::object& loss, const py::object& gradient) {
  delete library;
  library = nullptr;
  plans.clear();
  if (key.empty()) return;
  current_stream = reinterpret_cast<CurrentStream>(stream);
  parts_in_graph = parts;
  make_plan = py::object(make).release().ptr();
  loss_in_python = py::object(loss).release().ptr();
  gradient_in_python = py::object(gradient).release().ptr();
  library = new torch::Library(torch::Library::IMPL, "pseudograd", c10::parseDispatchKey(key), __FILE__,
                               __LINE__);
  library->impl("loss_on_gpu", &loss_on_gpu);
  library->impl("gradient_on_gpu", &gradient_on_gpu);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Launch>(module, "Launch")
      .def(py::init([](int64_t function, unsigned programs, unsigned threads, unsigned shared_bytes,
                       std::vector<int64_t> arguments,
                       std::vector<std::pair<size_t, size_t>> places, int64_t k_at) {
        return Launch{function, programs, threads, shared_bytes, arguments, places, k_at};
      }));
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def(py::init([](int64_t context, std::vector<Launch> forward, std::vector<Launch> backward,
                       at::ScalarType dtype, std::optional<at::ScalarType> gradient, int64_t parts,
                       int64_t values, int64_t found, int64_t dims) {
        return std::make_shared<Plan>(
            Plan{context, forward, backward, dtype, gradient, parts, values, found, dims});
      }));
  module.def("loss", &loss);
  module.def("run_operators", &run_operators);
  module.def("prepare", [](int64_t launch, int64_t context, std::string second,
                           std::string forward_mode) {
    launch_kernel = reinterpret_cast<CuLaunchKernel>(launch);
    set_context = reinterpret_cast<CuCtxSetCurrent>(context);
    no_second_derivative = std::move(second);
    no_forward_mode = std::move(forward_mode);
  });
}

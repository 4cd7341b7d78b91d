// Calls of planned ops: with all their pointers, as plain C functions (lowbit_native::functions), or with their first
// tensor alone (lowbit_native::held).
#include "ops_planned.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using lowbit::Planned;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Given = std::array<void*, Planned::kMost>;

// -- all pointers ----------------------------------------------------------------------------------------------------
void work(const Planned& plan, const Given& given) {
    Given pointers{};
    for (size_t i = 0; i < static_cast<size_t>(plan.tensors); ++i) {
        STD_TORCH_CHECK(given[i] != nullptr, "lowbit: a tensor has no memory of its own; give its clone()");
        pointers[static_cast<size_t>(plan.places[i])] = given[i];
    }
    plan.work(pointers.data());
}

// Null, or what went wrong, until this thread's next call. It is called as a plain C function.
const char* call(const Planned& plan, const Given& given) noexcept {
    thread_local std::string message;
    try {
        work(plan, given);
        return nullptr;
    } catch (const std::exception& error) {
        message = error.what();
        return message.c_str();
    }
}

template <size_t>
using Pointer = void*;
template <class>
struct Caller;
template <size_t... I>
struct Caller<std::index_sequence<I...>> {
    static const char* of(const Planned* plan, Pointer<I>... given) noexcept { return call(*plan, {given...}); }
};

void forget(const Planned* plan) noexcept { delete plan; }

// -- the first tensor alone ------------------------------------------------------------------------------------------
// What a plan depends on of a tensor.
class Kind {
  public:
    explicit Kind(const Tensor& t)
        : dtype_(t.scalar_type()), sizes_(list(t.sizes())), strides_(list(t.strides())), on_cpu_(t.is_cpu()) {}

    bool is_of(const Tensor& t) const {
        return t.scalar_type() == dtype_ && t.is_cpu() == on_cpu_ && same(t.sizes(), sizes_) &&
               same(t.strides(), strides_);
    }
    // A new tensor; contiguous, as this one must be.
    Tensor make() const {
        AtenTensorHandle made;
        const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype_));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes_.size()), sizes_.data(),
                                                               strides_.data(), dtype, aoti_torch_device_type_cpu(), 0,
                                                               &made));
        return Tensor(made);
    }

  private:
    using Ref = torch::headeronly::IntHeaderOnlyArrayRef;
    static std::vector<int64_t> list(Ref ints) { return {ints.begin(), ints.end()}; }
    static bool same(Ref a, const std::vector<int64_t>& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end());
    }

    ScalarType dtype_;
    std::vector<int64_t> sizes_, strides_;
    bool on_cpu_;
};

// A plan with all tensors between the first, which each call brings, and the last, which it makes.
struct Held {
    Planned plan;
    std::vector<Tensor> tensors;
    std::vector<Kind> kinds;    // of the first tensor, of these, and of the last
    std::vector<Tensor> moves;  // pairs of a tensor and a view of it, which is one of `tensors`
};

int64_t hold(int64_t plan, std::vector<Tensor> tensors, std::vector<Tensor> moves) {
    const Planned& given = *reinterpret_cast<const Planned*>(plan);
    STD_TORCH_CHECK(tensors.size() >= 2 && tensors.size() == static_cast<size_t>(given.tensors),
                    "lowbit: the plan is of ", given.tensors, " tensors, got ", tensors.size());
    STD_TORCH_CHECK(moves.size() % 2 == 0, "lowbit: needs pairs of tensors, got ", moves.size());
    auto held = std::make_unique<Held>();
    held->plan = given;
    held->tensors.assign(tensors.begin() + 1, tensors.end() - 1);
    for (const Tensor& t : tensors) held->kinds.emplace_back(t);
    held->moves = std::move(moves);
    return reinterpret_cast<int64_t>(held.release());
}

// Nothing where a tensor is no longer, or `x` is not, of the kind that the plan is for, or has left a view of it
// behind.
std::optional<Tensor> held(int64_t number, const Tensor& x) {
    const Held& h = *reinterpret_cast<const Held*>(number);
    const size_t middle = h.tensors.size();
    if (!h.kinds[0].is_of(x)) return std::nullopt;
    for (size_t i = 0; i < h.moves.size(); i += 2) {
        if (h.moves[i].const_data_ptr() != h.moves[i + 1].const_data_ptr()) return std::nullopt;
    }
    Given given{const_cast<void*>(x.const_data_ptr())};
    for (size_t i = 0; i < middle; ++i) {
        if (!h.kinds[i + 1].is_of(h.tensors[i])) return std::nullopt;
        given[i + 1] = const_cast<void*>(h.tensors[i].const_data_ptr());
    }
    Tensor out = h.kinds[middle + 1].make();
    given[middle + 1] = out.mutable_data_ptr();
    work(h.plan, given);
    return out;
}

// Where something sees every op (a mode, a transform, a tracer), it is to see the public one.
std::optional<Tensor> nothing(int64_t, const Tensor&) { return std::nullopt; }

void release(const Held* held) noexcept { delete held; }

// -- plain C functions -----------------------------------------------------------------------------------------------
template <class Function>
int64_t address(Function* function) {
    return reinterpret_cast<int64_t>(function);
}
template <size_t... N>
std::vector<int64_t> callers(std::index_sequence<N...>) {
    return {address(Caller<std::make_index_sequence<N>>::of)...};
}

// Addresses: of forget(plan), of release(held), and of call(plan, pointer, ...) with 0, 1, 2, ... pointers, those of
// the tensors that a call has. What frees memory is no op: a tracer would put it into a graph, to run again.
std::vector<int64_t> functions() {
    std::vector<int64_t> all = callers(std::make_index_sequence<Planned::kMost + 1>());
    all.insert(all.begin(), {address(forget), address(release)});
    return all;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CompositeExplicitAutograd, m) {
    m.impl("functions", TORCH_BOX(&functions));
    m.impl("hold", TORCH_BOX(&hold));
    m.impl("held", TORCH_BOX(&held));
}
STABLE_TORCH_LIBRARY_IMPL(lowbit_native, PythonTLSSnapshot, m) { m.impl("held", TORCH_BOX(&nothing)); }
STABLE_TORCH_LIBRARY_IMPL(lowbit_native, FuncTorchDynamicLayerFrontMode, m) { m.impl("held", TORCH_BOX(&nothing)); }
STABLE_TORCH_LIBRARY_IMPL(lowbit_native, Tracer, m) { m.impl("held", TORCH_BOX(&nothing)); }

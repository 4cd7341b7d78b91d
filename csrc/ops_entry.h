// How an op of the table (lowbit/ops) reaches its C++ kernel. The kernel takes the op's own arguments, formats and
// schemes by name, and its outputs to fill; it answers false for a call that it does not serve.
//
// LOWBIT_KERNEL makes it lowbit_native::NAME, which rows of lowbit/backends call. LOWBIT_OP makes it the public ops
// lowbit::NAME and NAME_out on the CPU too: checks, allocation and kernel in one C++ call. There a call that is not for
// it, or while another backend is asked for, goes on to lowbit_table::NAME, which is Python
// (lowbit/backends/dispatch.py): it checks with words, and chooses among all kernels. Errors come back from there as
// text (throw_refusal), since exceptions do not cross the stable ABI. What a kernel throws is for Python to word too;
// where Python finds nothing wrong with the call, it was a fault of the kernel, and is counted.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops_tensors.h"

namespace lowbit::entry {

// Whether a `use_backend` or an `explain` is open anywhere in the process, so that Python must choose.
bool chosen_elsewhere();

// Counts an error of a kernel that the call gave no reason for; lowbit_native::swallowed tells how many there were.
void count_swallowed();

// Throws the error that lowbit_native::refuse noted last on this thread.
[[noreturn]] void throw_refusal();

// The public ops that are served here, for lowbit_native::entries.
std::vector<std::string>& served_ops();

// A string argument, read where it lies: the conversion of the stable ABI (torch 2.13) leaks the copy that it makes.
class Text {
  public:
    explicit Text(StringHandle handle) : handle_(handle) {}
    Text(Text&& other) noexcept : handle_(other.release()) {}
    Text& operator=(Text&&) = delete;
    ~Text() {
        if (handle_ != nullptr) torch_delete_string(handle_);
    }
    std::string_view view() const {
        const char* data;
        size_t length;
        TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle_, &data));
        TORCH_ERROR_CODE_CHECK(torch_string_length(handle_, &length));
        return {data, length};
    }
    // Whose it is from now on.
    StringHandle release() { return std::exchange(handle_, nullptr); }

  private:
    StringHandle handle_;
};
using MaybeText = std::optional<Text>;

// An argument off the stack of an op, which then no longer owns it; and back, out of what held it.
template <class T>
T unbox(StableIValue value) {
    if constexpr (std::is_same_v<T, Text>) {
        return Text(torch::stable::detail::to<StringHandle>(value));
    } else if constexpr (std::is_same_v<T, MaybeText>) {
        const auto handle = torch::stable::detail::to<std::optional<StringHandle>>(value);
        return handle ? MaybeText(Text(*handle)) : std::nullopt;
    } else {
        return torch::stable::detail::to<T>(value);
    }
}
template <class T>
StableIValue box(T& value) {
    if constexpr (std::is_same_v<T, Text>) {
        return torch::stable::detail::from(value.release());
    } else if constexpr (std::is_same_v<T, MaybeText>) {
        return torch::stable::detail::from(value ? std::optional(value->release()) : std::nullopt);
    } else {
        return torch::stable::detail::from(value);
    }
}

template <class... T>
struct Arguments {
    using Tuple = std::tuple<std::decay_t<T>...>;
    using Indices = std::index_sequence_for<T...>;

    static Tuple unboxed(StableIValue* stack, uint64_t count) { return unboxed(stack, count, Indices()); }
    static void box_all(StableIValue* stack, Tuple& arguments) { box_all(stack, arguments, Indices()); }

  private:
    template <size_t... I>
    static Tuple unboxed(StableIValue* stack, uint64_t count, std::index_sequence<I...>) {
        STD_TORCH_CHECK(count == sizeof...(T), "lowbit: the schema of an op has ", count, " arguments, its kernel ",
                        sizeof...(T));
        return Tuple{unbox<std::decay_t<T>>(stack[I])...};
    }
    template <size_t... I>
    static void box_all(StableIValue* stack, Tuple& arguments, std::index_sequence<I...>) {
        ((stack[I] = box(std::get<I>(arguments))), ...);
    }
};

// The outputs that a call makes, as OpSpec.outputs gives them; nothing where Python is to choose, check or serve.
struct Out {
    std::vector<int64_t> sizes;
    ScalarType dtype;
};
template <size_t count>
using Outs = std::optional<std::array<Out, count>>;

// Whether a tensor that is given may be that output: it has its sizes and dtype, and is contiguous.
bool is_like(const Tensor& given, const Out& out);
// Whether the memory of an output meets that of an argument or of another output.
bool overlap(const Tensor& a, const Tensor& b);
inline bool overlap(const Tensor& out, const std::optional<Tensor>& other) { return other && overlap(out, *other); }
template <class T>
bool overlap(const Tensor&, const T&) {
    return false;
}

// lowbit_native::NAME.
template <auto kernel>
struct Native;
template <class Result, class... T, Result (*kernel)(T...)>
struct Native<kernel> {
    static void run(StableIValue* stack, uint64_t inputs, uint64_t) {
        auto arguments = Arguments<T...>::unboxed(stack, inputs);
        if constexpr (std::is_void_v<Result>) {
            std::apply(kernel, arguments);
        } else {
            STD_TORCH_CHECK(std::apply(kernel, arguments),
                            "lowbit: this kernel was chosen for a call that it does not serve");
        }
    }
};

// Lets `serve` serve the call, with its arguments off the stack. Where it does not, Python does, and what Python
// answers is on the stack then: `answered` takes it, or says that Python raised.
template <class All, class Serve, class Answered>
void serve_or_pass_on(const char* python, StableIValue* stack, uint64_t inputs, const Serve& serve,
                      const Answered& answered) {
    bool threw = false;
    if (!chosen_elsewhere()) {
        auto arguments = All::unboxed(stack, inputs);
        try {
            if (serve(arguments)) return;
        } catch (const std::bad_alloc&) {  // a kernel that needs less memory is no answer
            throw;
        } catch (const std::exception&) {  // Python finds the words
            threw = true;
        }
        All::box_all(stack, arguments);
    }
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(python, "", stack, TORCH_ABI_VERSION));
    if (!answered()) throw_refusal();
    if (threw) count_swallowed();
}

// lowbit::NAME, which makes its outputs, and lowbit::NAME_out, which fills those that are given.
template <auto kernel, auto outputs, class Python>
struct Public;
template <class... K, bool (*kernel)(K...), class... T, size_t count, Outs<count> (*outputs)(T...), class Python>
struct Public<kernel, outputs, Python> {
    static void make(StableIValue* stack, uint64_t inputs, uint64_t) {
        const auto serve = [&](auto& arguments) {
            const Outs<count> described = std::apply(outputs, arguments);
            return described && make(stack, arguments, *described, std::index_sequence_for<T...>(), Each());
        };
        const auto answered = [&] {  // the tensors; none where Python raised
            const auto outs = torch::stable::detail::to<std::vector<Tensor>>(stack[0]);
            for (size_t i = 0; i < outs.size(); ++i) stack[i] = torch::stable::detail::from(outs[i]);
            return !outs.empty();
        };
        serve_or_pass_on<Arguments<T...>>(Python::make(), stack, inputs, serve, answered);
    }

    static void fill(StableIValue* stack, uint64_t inputs, uint64_t) {
        const auto serve = [](auto& arguments) {
            return fits(arguments, std::index_sequence_for<T...>(), Each()) && std::apply(kernel, arguments);
        };
        const auto answered = [&] { return torch::stable::detail::to<bool>(stack[0]); };
        serve_or_pass_on<Arguments<K...>>(Python::fill(), stack, inputs, serve, answered);
    }

  private:
    using Each = std::make_index_sequence<count>;

    template <size_t... I, size_t... O>
    static bool make(StableIValue* stack, typename Arguments<T...>::Tuple& arguments,
                     const std::array<Out, count>& described, std::index_sequence<I...>, std::index_sequence<O...>) {
        const std::array<Tensor, count> outs{new_tensor(described[O].sizes, described[O].dtype)...};
        if (!kernel(std::get<I>(arguments)..., outs[O]...)) return false;
        ((stack[O] = torch::stable::detail::from(outs[O])), ...);
        return true;
    }
    // Whether the outputs that follow the arguments are those of the call, and lie apart from them and each other.
    template <size_t... I, size_t... O>
    static bool fits(typename Arguments<K...>::Tuple& arguments, std::index_sequence<I...>, std::index_sequence<O...>) {
        const Outs<count> described = outputs(std::get<I>(arguments)...);
        if (!described) return false;
        const std::array<const Tensor*, count> outs{&std::get<sizeof...(I) + O>(arguments)...};
        for (size_t i = 0; i < count; ++i) {
            if (!is_like(*outs[i], (*described)[i]) || (overlap(*outs[i], std::get<I>(arguments)) || ...)) return false;
            for (size_t j = 0; j < i; ++j) {
                if (overlap(*outs[i], *outs[j])) return false;
            }
        }
        return true;
    }
};

// Registers `kernel` for a device.
#define LOWBIT_KERNEL(op, kernel, device) \
    STABLE_TORCH_LIBRARY_IMPL(lowbit_native, device, m) { m.impl(#op, &lowbit::entry::Native<(kernel)>::run); }

// The same on the CPU, and as the public ops, whose outputs are what `outputs` answers.
#define LOWBIT_OP(op, kernel, outputs)                                                             \
    LOWBIT_KERNEL(op, kernel, CPU)                                                                 \
    STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {                                                    \
        struct Python {                                                                            \
            static const char* make() { return "lowbit_table::" #op; }                             \
            static const char* fill() { return "lowbit_table::" #op "_out"; }                      \
        };                                                                                         \
        using Op = lowbit::entry::Public<(kernel), (outputs), Python>;                             \
        m.impl(#op, &Op::make);                                                                    \
        m.impl(#op "_out", &Op::fill);                                                             \
        for (const char* name : {#op, #op "_out"}) lowbit::entry::served_ops().emplace_back(name); \
    }

}  // namespace lowbit::entry

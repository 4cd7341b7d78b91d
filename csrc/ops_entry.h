// Public ops (torch.ops.lowbit.NAME) on the CPU: checks, allocation and kernel in one C++ call.
//
// An entry returns nullopt to decline a call: arguments that do not fit, a layout that must be copied first, a format
// that no call has named yet, another backend asked for. Python then handles the call (lowbit_table::NAME, in
// lowbit/backends/dispatch.py): it checks again, words the error, and chooses among all kernels. Errors come back as
// text (throw_refusal), since exceptions do not cross the stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lowbit::entry {

using torch::stable::Tensor;

// Whether a `use_backend` or an `explain` is open anywhere in the process, so that Python must choose.
bool chosen_elsewhere();

// Throws the error that lowbit_native::refuse noted last on this thread.
[[noreturn]] void throw_refusal();

// A string argument, read where it lies: the conversion of the stable ABI (torch 2.13) leaks the copy that it makes.
class Text {
  public:
    explicit Text(StringHandle handle)
        : handle_(handle, [](StringHandle h) { TORCH_ERROR_CODE_CHECK(torch_delete_string(h)); }) {}
    std::string_view view() const {
        const char* data;
        size_t length;
        TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle_.get(), &data));
        TORCH_ERROR_CODE_CHECK(torch_string_length(handle_.get(), &length));
        return {data, length};
    }

  private:
    std::shared_ptr<std::remove_pointer_t<StringHandle>> handle_;
};
using MaybeText = std::optional<Text>;

// An argument off the stack of an op, which then no longer owns it; and back.
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
StableIValue box(const T& value) {
    if constexpr (std::is_same_v<T, Text>) {
        return torch::stable::detail::from(std::string(value.view()));
    } else if constexpr (std::is_same_v<T, MaybeText>) {
        return torch::stable::detail::from(value ? std::optional(std::string(value->view())) : std::nullopt);
    } else {
        return torch::stable::detail::from(value);
    }
}

// What an entry returns, on the stack of the op: new tensors, or nothing where it filled given ones.
inline void put(StableIValue* stack, const std::optional<Tensor>& out) { stack[0] = torch::stable::detail::from(*out); }
template <class... T>
void put(StableIValue* stack, const std::optional<std::tuple<T...>>& outs) {
    torch::stable::detail::box_from_tuple<T...>(stack, *outs);
}
inline void put(StableIValue*, bool) {}

// The same of lowbit_table::NAME, which answers the tensors, none where it failed; or whether it filled those given.
template <class Result>
void take(StableIValue* stack) {
    if constexpr (std::is_same_v<Result, bool>) {
        if (!torch::stable::detail::to<bool>(stack[0])) throw_refusal();
    } else {
        const auto outs = torch::stable::detail::to<std::vector<Tensor>>(stack[0]);
        if (outs.empty()) throw_refusal();
        for (size_t i = 0; i < outs.size(); ++i) stack[i] = torch::stable::detail::from(outs[i]);
    }
}

template <auto function, class Table>
struct Entry;
template <class Result, class... Arguments, Result (*function)(Arguments...), class Table>
struct Entry<function, Table> {
    static void run(StableIValue* stack, uint64_t inputs, uint64_t) {
        STD_TORCH_CHECK(inputs == sizeof...(Arguments), "lowbit: the schema of ", Table::name(), " has ", inputs,
                        " arguments, its entry ", sizeof...(Arguments));
        if (!chosen_elsewhere() && served(stack)) return;
        TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(Table::name(), "", stack, TORCH_ABI_VERSION));
        take<Result>(stack);
    }

  private:
    // Takes the arguments off the stack, and puts them back where it answers no.
    static bool served(StableIValue* stack) { return served(stack, std::index_sequence_for<Arguments...>()); }
    template <size_t... I>
    static bool served(StableIValue* stack, std::index_sequence<I...>) {
        std::tuple<std::decay_t<Arguments>...> arguments{unbox<std::decay_t<Arguments>>(stack[I])...};
        try {
            if (const Result result = std::apply(function, arguments)) {
                put(stack, result);
                return true;
            }
        } catch (const std::exception&) {  // Python finds the words
        }
        ((stack[I] = box(std::get<I>(arguments))), ...);
        return false;
    }
};

// Registers `function` as the CPU kernel of lowbit::NAME.
#define LOWBIT_ENTRY(library, op, function)                                 \
    {                                                                       \
        struct Table {                                                      \
            static const char* name() { return "lowbit_table::" #op; }      \
        };                                                                  \
        (library).impl(#op, &lowbit::entry::Entry<(function), Table>::run); \
    }

}  // namespace lowbit::entry

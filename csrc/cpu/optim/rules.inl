// The rules of optimizers on F, a float or a vector of them, in the namespace that includes this; docs/numerics.md
// section 11. It has splat(float), and root(F), which is correctly rounded.
//
// A rule is a struct of its factors. step(p, g, m) replaces the moments m and returns the next parameter. kPositive
// says which moments are never negative. A rule that divides (kDivides) has its step in the parts of rules/adamw.inl.
#include "cpu/optim/rules/adamw.inl"
#include "cpu/optim/rules/lion.inl"
#include "cpu/optim/rules/momentum.inl"
#include "cpu/optim/rules/sgd.inl"

// Calls f(rule), a struct of those, of the factors that are given.
template <class Function>
inline void with_rule(const StepRule& rule, const Function& f) {
    switch (rule.id) {
#define LOWBIT_RULE(name, type, ...) \
    case RuleId::name:               \
        return f(type(rule.factors));
        LOWBIT_RULES(LOWBIT_RULE)
#undef LOWBIT_RULE
    }
}

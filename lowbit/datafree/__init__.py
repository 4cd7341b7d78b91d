"""Codes and scales of a weight without data: candidates for the scale of a block, and the rules made of them."""

from lowbit.datafree.rules import DEFAULT, RULES, Rule, default_rule, find_rule

__all__ = ["DEFAULT", "RULES", "Rule", "default_rule", "find_rule"]

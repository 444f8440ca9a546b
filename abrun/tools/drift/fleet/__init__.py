"""Fleet: many recipes, each with a frozen reference, judged side by side at a false discovery rate."""

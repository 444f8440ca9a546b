"""What one begins with: the recipes that ship, a recipe of one's own, and what an editor knows of recipes."""

"""`edgeloop doctor`: what is missing or wrong with a set-up, and how to mend each finding."""

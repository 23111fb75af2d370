"""What streams would say: the logit lens, the tuned lens, and what each part does to a logit."""

"""What layers and heads of a model may share for HShare: measured on texts, and written."""

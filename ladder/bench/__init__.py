"""Everything that measures: inference, training, communication; traces, figures and pages."""

"""A kernel as text: translation units, written from the templates in cpp/cutlass."""

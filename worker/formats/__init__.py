"""Formats of thinking, calls and vocabularies: data that routers read by and replicas constrain by.

Owns the table of families, the texts of their calls that follow from it, and the bytes of tokens in each kind of
vocabulary. Imports nothing of the product, and knows neither readers nor grammars. Read `families.py` first, then
`syntax.py`.
"""

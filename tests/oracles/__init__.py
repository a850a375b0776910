"""Independent oracles for the tests: naive, slow, and written without a look at `emtau_dask`.

Nothing here imports the package under test. `naive` follows the paper with the whole N x K matrix in hand,
`policies` its Procedures 1 to 3, `extended` does the same in extended precision, `starts` makes data, starts
and chunkings, `cases` names the algorithms, `agree` holds the comparisons.
"""

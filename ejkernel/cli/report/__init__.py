"""One self-contained page from results: charts, filters, and the same values as tables.

`results.py` reads every shape of file that the project records, `charts.py` draws what they hold,
and `page.py` puts it together. The page loads nothing: style and script are inside it.
"""

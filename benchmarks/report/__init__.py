"""Writes what README.md and docs/benchmarks.md say of support and speed, from recorded results.

python -m benchmarks.report           write the documents and pictures
python -m benchmarks.report --check   exit with 1 and name the files that are not up to date
"""

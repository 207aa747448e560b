"""Random legal calls of every operation: `ejkernel check --random`.

| module | contents |
|---|---|
| `choices` | a call as choices that are drawn and simplified, and as a program |
| `softmax`, `linear`, `paged`, `others` | the choices of each operation |
| `arrays` | what arguments are made from |
| `judge` | a call on one platform, compared with its reference |
| `run` | many calls, in this process or in several; failures minimised |
"""

from ejkernel.cli.random_calls.judge import compare as compare

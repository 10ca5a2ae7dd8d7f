"""until_it_speaks.py SIGNAL CODE COMMAND...: run a command that serves until it is stopped, stop it once it has written a line,
and end with 0 when it ends with CODE. What it writes is written."""

import os
import signal
import subprocess
import sys
import threading

name, code, *command = sys.argv[1:]
# as from a terminal: a shell without job control would have it ignore SIGINT
process = subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
)
assert process.stdout is not None
watch = threading.Timer(60, process.kill)
watch.start()
sys.stdout.buffer.write(process.stdout.readline())
os.kill(process.pid, signal.Signals[f"SIG{name}"])
sys.stdout.buffer.write(process.stdout.read())
watch.cancel()
sys.exit(0 if process.wait() == int(code) else process.returncode or 1)

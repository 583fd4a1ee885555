// Command kvctl talks to an EpochKV server from the shell.
//
// Each verb has a file of its own. What they share: app.go (global flags, running a verb), exit.go (errors to exit codes and
// advice), output.go (formats), record.go and csv.go (the lines that import and export exchange), progress.go.
//
// Standard output carries the answer and nothing else, so that it can be piped; everything said about the answer goes to standard
// error.
package main

import (
	"os"

	"golang.org/x/term"
)

func main() {
	i := new(interrupts)
	ctx, stop := i.watch()
	a := &app{
		interrupts:  i,
		in:          os.Stdin,
		out:         os.Stdout,
		err:         os.Stderr,
		inTerminal:  term.IsTerminal(int(os.Stdin.Fd())),
		outTerminal: term.IsTerminal(int(os.Stdout.Fd())),
		errTerminal: term.IsTerminal(int(os.Stderr.Fd())),
		screen:      screenOf(os.Stdout),
		getenv:      os.Getenv,
	}
	code := a.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// screenOf returns the size of the terminal that a file is, or zeros.
func screenOf(file *os.File) func() (columns, rows int) {
	return func() (columns, rows int) {
		columns, rows, err := term.GetSize(int(file.Fd()))
		if err != nil {
			return 0, 0
		}
		return columns, rows
	}
}

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// readSecret reads a password or a token: from the terminal without showing it, or else one line of standard input. No flag has
// secrets: other processes see command lines, and shells keep them.
func (a *app) readSecret(ctx context.Context, prompt string) (string, error) {
	if !a.inTerminal {
		if a.lines == nil {
			a.lines = bufio.NewReader(a.in)
		}
		line, err := a.lines.ReadString('\n')
		line = strings.TrimRight(line, "\r\n")
		switch {
		case line != "":
			return line, nil
		case err == nil || errors.Is(err, io.EOF):
			return "", usageError{fmt.Errorf("standard input has no line for: %s", strings.ToLower(prompt))}
		}
		return "", err
	}
	if _, err := fmt.Fprintf(a.err, "%s: ", prompt); err != nil {
		return "", err
	}
	secret, err := readHidden(ctx)
	_, _ = fmt.Fprintln(a.err)
	if err == nil && secret == "" {
		err = errors.New("nothing was typed")
	}
	return secret, err
}

// readHidden reads a line of the terminal. It shows again what is typed, also if ctx ends meanwhile.
func readHidden(ctx context.Context) (string, error) {
	in := int(os.Stdin.Fd())
	state, err := term.GetState(in)
	if err != nil {
		return "", err
	}
	type typed struct {
		secret []byte
		err    error
	}
	read := make(chan typed, 1)
	go func() {
		secret, err := term.ReadPassword(in)
		read <- typed{secret, err}
	}()
	select {
	case t := <-read:
		return string(t.secret), t.err
	case <-ctx.Done(): // the goroutine is left to itself
		return "", errors.Join(context.Cause(ctx), term.Restore(in, state))
	}
}

// readNewPassword reads a password, on a terminal twice.
func (a *app) readNewPassword(ctx context.Context, user string) (string, error) {
	password, err := a.readSecret(ctx, "New password of "+user)
	if err != nil || !a.inTerminal {
		return password, err
	}
	again, err := a.readSecret(ctx, "The same again")
	if err == nil && again != password {
		err = errors.New("the passwords differ")
	}
	return password, err
}

// printToken prints a token, and says if other accounts can read the file that it goes to.
func (a *app) printToken(token string) error {
	if err := a.print("%s\n", token); err != nil {
		return err
	}
	file, ok := a.out.(*os.File)
	if !ok {
		return nil
	}
	if info, err := file.Stat(); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o077 != 0 {
		_, _ = fmt.Fprintf(a.err, "kvctl: other accounts may read the file with the token (mode %v); chmod 600 takes that away, and umask 077 before\n", info.Mode().Perm())
	}
	return nil
}

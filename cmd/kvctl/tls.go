package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/certs"
)

// The files of kvctl tls init.
const (
	fileCA, fileCAKey         = "ca.crt", "ca.key"
	fileServer, fileServerKey = "server.crt", "server.key"
	fileClient, fileClientKey = "client.crt", "client.key"
)

func (a *app) tlsCommand() *cobra.Command {
	group := &cobra.Command{
		Use:     "tls",
		Short:   "Make certificates for a trial, and reload those of a server",
		Example: "  kvctl tls init ./tls\n  kvctl tls reload",
	}
	var hosts []string
	days := 365
	initialize := &cobra.Command{
		Use:   "init [DIR]",
		Short: "Make an authority, and certificates for a server and a client",
		Long: `Make an authority, and certificates for a server and a client that it has signed, in DIR (default: ./tls). They are for a trial: a program
that can read ca.key can make further ones. The server's certificate is for localhost, the loopback addresses, the name of this machine, and --host.
Keys have mode 0600. Nothing is overwritten.`,
		Example: "  kvctl tls init\n  kvctl tls init /etc/epochkv/tls --host db1.example --host 10.0.0.7 --days 30",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			dir := "tls"
			if len(args) > 0 {
				dir = args[0]
			}
			if days < 1 || days > 3650 {
				return usageError{fmt.Errorf("--days %d: choose 1 to 3650", days)}
			}
			return a.tlsInit(dir, hosts, time.Duration(days)*24*time.Hour)
		},
	}
	initialize.Flags().StringArrayVar(&hosts, "host", nil, "further `NAME` or address of the server; may be repeated")
	initialize.Flags().IntVar(&days, "days", days, "the certificates are valid for `N` days")
	group.AddCommand(initialize, &cobra.Command{
		Use:   "reload",
		Short: "Let the server read its certificate files again",
		Long: `Let the server read its certificate files again, which it does by itself within some seconds when they have changed. If anything is wrong with
them, the server keeps the certificates that it has, and the command says what is wrong.`,
		Example: "  kvctl tls reload",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.tlsReload(cmd.Context()) },
	})
	return group
}

func (a *app) tlsInit(dir string, hosts []string, lifetime time.Duration) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for _, name := range []string{fileCA, fileCAKey, fileServer, fileServerKey, fileClient, fileClientKey} { // before any is written
		_, err := os.Lstat(filepath.Join(dir, name))
		switch {
		case err == nil:
			return fmt.Errorf("%s exists and is not overwritten; name another directory, or remove the files", filepath.Join(dir, name))
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
	}
	names := append([]string{"localhost", "127.0.0.1", "::1"}, hosts...)
	if host, err := os.Hostname(); err == nil && !slices.Contains(names, host) {
		names = append(names, host)
	}
	files, err := trialCertificates(names, time.Now(), lifetime)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := writeNew(filepath.Join(dir, f.name), f.text, f.mode); err != nil {
			return err
		}
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	return a.print(`Made an authority, and certificates for a server (%s) and a client, valid for %d days.

  kvserver --tls-cert %s --tls-key %s --tls-client-ca %s --tls-client-auth require
  kvctl --tls-ca %s --tls-cert %s --tls-key %s status
`, strings.Join(names, ", "), int(lifetime.Hours()/24), in(fileServer), in(fileServerKey), in(fileCA), in(fileCA), in(fileClient), in(fileClientKey))
}

// trialFile is a file to be written.
type trialFile struct {
	name string
	text []byte
	mode fs.FileMode
}

func trialCertificates(names []string, now time.Time, lifetime time.Duration) ([]trialFile, error) {
	subject := certs.Subject{Name: "EpochKV trial authority", NotBefore: now.Add(-time.Hour), NotAfter: now.Add(lifetime)} // clocks differ
	authority, err := certs.NewAuthority(subject)
	if err != nil {
		return nil, err
	}
	subject.Name, subject.Hosts = "kvserver", names
	server, err := authority.Issue(subject)
	if err != nil {
		return nil, err
	}
	subject.Name, subject.Hosts = "kvctl", nil
	user, err := authority.Issue(subject)
	if err != nil {
		return nil, err
	}
	const public, private = 0o644, 0o600
	return []trialFile{
		{fileCA, authority.PEM().Cert, public},
		{fileCAKey, authority.PEM().Key, private},
		{fileServer, server.Cert, public},
		{fileServerKey, server.Key, private},
		{fileClient, user.Cert, public},
		{fileClientKey, user.Key, private},
	}, nil
}

// writeNew writes a file that does not exist.
func writeNew(name string, text []byte, mode fs.FileMode) error {
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	return errors.Join(err, file.Close())
}

func (a *app) tlsReload(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	return a.withClient(func(c *client.Client) error {
		done, err := c.ReloadTLS(ctx)
		if err != nil {
			return err
		}
		if a.formatOr(formatTable) != formatTable {
			return a.print("{\"changed\":%v,\"subject\":%q,\"serial\":%q,\"not_after\":%q,\"client_authorities\":%d}\n",
				done.GetChanged(), done.GetSubject(), done.GetSerial(), done.GetNotAfter().AsTime().Format(time.RFC3339), done.GetClientAuthorities())
		}
		what := "nothing has changed"
		if done.GetChanged() {
			what = "new connections get the new certificates"
		}
		return a.print("%s: %s for %s, valid until %s, %d client authorities\n", what, done.GetSubject(), strings.Join(done.GetNames(), ", "),
			done.GetNotAfter().AsTime().Format(time.RFC3339), done.GetClientAuthorities())
	})
}

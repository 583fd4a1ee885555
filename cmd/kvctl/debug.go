package main

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// cpuProfileMax is below the time for which the server writes one answer over HTTP.
const cpuProfileMax = 90 * time.Second

// bundleFlags are those of debug bundle.
type bundleFlags struct {
	file, http string
	cpu        time.Duration
	withKeys   bool
}

func (a *app) debugCommand() *cobra.Command {
	group := &cobra.Command{
		Use:     "debug",
		Short:   "Collect what helps to find out what is wrong with a server",
		Example: "  kvctl debug bundle",
	}
	var f bundleFlags
	bundle := &cobra.Command{
		Use:   "bundle",
		Short: "Write a zip file with the state of the server",
		Long: `Write a zip file with the state of the server, for a report of a problem: status, conditions, configuration, slow requests, transactions,
snapshots, watches, holds, readers of the log, backup and archive; and from its HTTP port metrics, goroutines, a heap profile, and with
--cpu-profile a CPU profile. README.txt in it says what each part is. A part that cannot be had is named there, and the bundle is still made.

Keys and values of the store are not in it: ranges of watches, beginnings of keys and texts of errors that may name keys are left out unless
--with-keys is given. Names of files, addresses of clients and the configuration are in it.

Without --http, the address is that of the server's option "http"; "--http none" leaves these parts out.`,
		Example: `  kvctl debug bundle
  kvctl debug bundle --file trouble.zip --cpu-profile 10s
  kvctl debug bundle --endpoint db1:7400 --http https://db1:7401`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.cpu < 0 || f.cpu > cpuProfileMax {
				return usageError{fmt.Errorf("--cpu-profile %v: must be between 0s and %v", f.cpu, cpuProfileMax)}
			}
			return a.withClient(func(c *client.Client) error { return a.makeBundle(cmd.Context(), c, f) })
		},
	}
	flags := bundle.Flags()
	flags.StringVar(&f.file, "file", "", "write to `FILE`, which must not exist (default: epochkv-debug-TIME.zip)")
	flags.StringVar(&f.http, "http", "", "`URL` of the server's HTTP port, such as http://db1:7401; none: ask nothing there")
	flags.DurationVar(&f.cpu, "cpu-profile", 0, "add a CPU profile of this `DURATION`, 90s at most")
	flags.BoolVar(&f.withKeys, "with-keys", false, "keep what may have keys in it")
	group.AddCommand(bundle)
	return group
}

// bundlePart is one file of a bundle.
type bundlePart struct {
	name, about string
	collect     func(ctx context.Context) ([]byte, error)
	timeout     time.Duration

	content []byte
	err     error
}

// makeBundle collects all parts at once, and writes them. Its error is that of the status, if not even that can be had.
func (a *app) makeBundle(ctx context.Context, c *client.Client, f bundleFlags) error {
	if f.file == "" {
		f.file = "epochkv-debug-" + time.Now().UTC().Format("20060102-150405") + ".zip"
	}
	file, err := os.OpenFile(f.file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	parts := a.serverParts(c, f.withKeys)
	http, missing := a.bundleHTTP(ctx, c, f.http)
	parts = append(parts, http.parts(missing, f.cpu)...)
	collect(ctx, parts, a.timeout)
	if err := ctx.Err(); err != nil {
		return errors.Join(context.Cause(ctx), file.Close(), os.Remove(f.file))
	}
	err = errors.Join(writeBundle(file, a.endpoint, parts, f.withKeys), file.Close())
	if err != nil {
		return errors.Join(err, os.Remove(f.file))
	}
	if err := a.tellBundle(f.file, parts); err != nil {
		return err
	}
	return parts[0].err
}

// collect gets all parts at once, so that those that do not come take no longer together than one of them.
func collect(ctx context.Context, parts []*bundlePart, timeout time.Duration) {
	done := make(chan struct{})
	for _, p := range parts {
		go func() {
			ctx, cancel := context.WithTimeout(ctx, timeout+p.timeout)
			defer cancel()
			p.content, p.err = p.collect(ctx)
			done <- struct{}{}
		}()
	}
	for range parts {
		<-done
	}
}

// tellBundle names the file, and on standard error what is missing in it.
func (a *app) tellBundle(name string, parts []*bundlePart) error {
	bytes := 0
	for _, p := range parts {
		bytes += len(p.content)
		if p.err != nil {
			_, _ = fmt.Fprintf(a.err, "kvctl: %s is missing: %s\n", p.name, printable(p.err.Error()))
		}
	}
	if format := a.formatOr(formatTable); printsJSON(format) {
		missing := []string{}
		for _, p := range parts {
			if p.err != nil {
				missing = append(missing, p.name)
			}
		}
		return a.printJSON(format, struct {
			File    string   `json:"file"`
			Missing []string `json:"missing"`
		}{name, missing})
	}
	return a.print("%s: %s of data\n", name, size(uint64(bytes)))
}

func writeBundle(w io.Writer, endpoint string, parts []*bundlePart, withKeys bool) error {
	z := zip.NewWriter(w)
	write := func(name string, content []byte) error {
		part, err := z.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate, Modified: time.Now()})
		if err == nil {
			_, err = part.Write(content)
		}
		return err
	}
	err := write("README.txt", bundleReadme(endpoint, parts, withKeys))
	for _, p := range parts {
		if p.err == nil {
			err = errors.Join(err, write(p.name, p.content))
		}
	}
	return errors.Join(err, z.Close())
}

// bundleReadme says what is in a bundle, and what is not.
func bundleReadme(endpoint string, parts []*bundlePart, withKeys bool) []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "State of the EpochKV server at %s, collected at %s by kvctl debug bundle.\n\n", endpoint, time.Now().UTC().Format(time.RFC3339))
	if withKeys {
		out.WriteString("Keys of the store may be in it: it was made with --with-keys. Values are not.\n\n")
	} else {
		out.WriteString("No keys and no values of the store are in it. What may name keys is left out: ranges of watches, beginnings of the keys\n" +
			"of slow requests, and texts of errors about damage. File names, addresses of clients and the configuration are in it.\n\n")
	}
	for _, p := range parts {
		fmt.Fprintf(&out, "%-18s %s\n", p.name, p.about)
		if p.err != nil {
			fmt.Fprintf(&out, "%18s MISSING: %s\n", "", strings.ReplaceAll(printable(p.err.Error()), "\n", " "))
		}
	}
	return out.Bytes()
}

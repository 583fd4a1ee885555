package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// envPrefix is the prefix of every environment variable of the server.
const envPrefix = "KVSERVER_"

// Invocation is the request of a command line: run with Config, or print something and exit.
type Invocation struct {
	Config  Config
	Help    string   // not empty: print it and exit
	Version bool     // print the version and exit
	Ignored []string // environment variables with the server's prefix that Kubernetes injects
}

// Load reads the sources in order and validates the result. args are without the program's name;
// environ is as from os.Environ.
func Load(args, environ []string) (Invocation, error) { return load(args, environ, false) }

// load is Load, which may have been called before with the same sources.
func load(args, environ []string, again bool) (Invocation, error) {
	// The command line is parsed twice: first to find --config and --help, and last so that it
	// wins.
	probe := newOptions()
	if err := probe.flags.Parse(args); err != nil {
		return Invocation{}, fmt.Errorf("%w; see --help", err)
	}
	switch {
	case probe.help:
		return Invocation{Help: probe.usage()}, nil
	case probe.version:
		return Invocation{Version: true}, nil
	case probe.flags.NArg() > 0:
		return Invocation{}, fmt.Errorf("unexpected argument %q; options begin with --, see --help", probe.flags.Arg(0))
	}
	o := newOptions()
	if err := o.fromEnviron(environ, "config"); err != nil {
		return Invocation{}, err
	}
	if file := cmp.Or(probe.file, o.file); file != "" {
		if err := o.fromFile(file, again); err != nil {
			return Invocation{}, err
		}
	}
	if err := o.fromEnviron(environ, ""); err != nil {
		return Invocation{}, err
	}
	if err := o.flags.Parse(args); err != nil {
		return Invocation{}, err
	}
	o.flags.Visit(func(f *pflag.Flag) { o.origins[f.Name] = OriginFlag })
	o.config.origins, o.config.sources = &o.origins, &sources{args, environ}
	return Invocation{Config: o.config, Ignored: o.ignored}, o.config.Validate()
}

// options binds every option's name to its field. The flag set is the one table of names for all
// three sources.
type options struct {
	config  Config
	file    string
	help    bool
	version bool
	ignored []string
	flags   *pflag.FlagSet
	origins origins
}

// choice makes a string type a flag value; Validate knows its allowed words.
type choice string

func (c *choice) String() string { return string(*c) }

func (c *choice) Set(s string) error {
	*c = choice(strings.ToLower(s))
	return nil
}

func (c *choice) Type() string { return "word" }

// levelText reads a log level in any case and writes it in lower case.
type levelText struct{ level *slog.Level }

func (l *levelText) UnmarshalText(text []byte) error {
	if err := l.level.UnmarshalText(text); err != nil {
		return fmt.Errorf("%q is not a level; choose debug, info, warn or error", text)
	}
	return nil
}

func (l *levelText) MarshalText() ([]byte, error) {
	return bytes.ToLower([]byte(l.level.String())), nil
}

// fromEnviron reads the variables that begin with the prefix; if only is not empty, just that one.
func (o *options) fromEnviron(environ []string, only string) error {
	for _, entry := range environ {
		variable, value, _ := strings.Cut(entry, "=")
		name, ours := strings.CutPrefix(variable, envPrefix)
		if !ours {
			continue
		}
		name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
		if only != "" && name != only {
			continue
		}
		if o.flags.Lookup(name) == nil && injected(variable, value) {
			o.ignored = append(o.ignored, variable)
			continue
		}
		if err := o.set(name, value); err != nil {
			return fmt.Errorf("environment variable %s: %w", variable, err)
		}
		o.origins[name] = OriginEnvironment
	}
	return nil
}

// fromFile reads a YAML mapping of option names to scalars. An empty file changes nothing.
func (o *options) fromFile(name string, again bool) error {
	text, err := readFile(name, again)
	if err != nil {
		return fmt.Errorf("configuration file: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("configuration file %s: %w", name, err)
	}
	if len(doc.Content) == 0 {
		return nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("configuration file %s:%d: want lines of the form `memory: 256MiB`", name, root.Line)
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		err := o.set(key.Value, value.Value)
		switch {
		case value.Kind != yaml.ScalarNode:
			err = errors.New("want a single value")
		case key.Value == "config":
			err = errors.New("a configuration file cannot name another")
		case seen[key.Value]:
			err = errors.New("is given twice")
		}
		if err != nil {
			return fmt.Errorf("configuration file %s:%d: %s: %w", name, key.Line, key.Value, err)
		}
		seen[key.Value] = true
		o.origins[key.Value] = fmt.Sprintf("%s %s:%d", OriginFile, name, key.Line)
	}
	return nil
}

// fileBytesMax bounds a configuration file, which may be the wrong one: a device, or a file of data.
const fileBytesMax = 1 << 20

// readFile reads the file of a start, which may be a pipe (--config <(decrypt FILE) of a shell), or the same file again. A pipe has its
// content once: whatever opens it again waits for ever, or finds it empty, which would be the defaults.
func readFile(name string, again bool) ([]byte, error) {
	flags := os.O_RDONLY
	if again {
		flags |= syscall.O_NONBLOCK
	}
	file, err := os.OpenFile(name, flags, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // only read
	if info, err := file.Stat(); err != nil || again && !info.Mode().IsRegular() {
		return nil, cmp.Or(err, fmt.Errorf("%s is no regular file, and can be read at the start only; start the server again", name))
	}
	text, err := io.ReadAll(io.LimitReader(file, fileBytesMax+1))
	if err == nil && len(text) > fileBytesMax {
		err = fmt.Errorf("%s is longer than %v; name a YAML file of options", name, Size(fileBytesMax))
	}
	return text, err
}

// errUnknownOption marks a name that is not an option.
var errUnknownOption = errors.New("unknown option")

func (o *options) set(name, value string) error {
	flag := o.flags.Lookup(name)
	if flag == nil || name == "help" || name == "version" {
		return fmt.Errorf("%w; the options are %s", errUnknownOption, strings.Join(o.names(), ", "))
	}
	return flag.Value.Set(value)
}

// names lists the options that a file may hold.
func (o *options) names() []string {
	var names []string
	o.flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains([]string{"config", "help", "version"}, f.Name) {
			names = append(names, f.Name)
		}
	})
	return names
}

func (o *options) usage() string {
	return `kvserver runs EpochKV, a transactional multi-version key-value server.

Usage:
  kvserver [options]

Examples:
  kvserver
        serve ./data on 127.0.0.1:7400, metrics on 127.0.0.1:7401
  kvserver --listen 0.0.0.0:7400 --tls-cert server.crt --tls-key server.key --tls-client-ca ca.crt --tls-client-auth require
        a server that other machines can reach, with certificates that kvctl tls init has made
  kvserver --durability async --sync-interval 20ms
        acknowledge writes when visible; a crash may cost the last 20 ms
  KVSERVER_LOG_FORMAT=json kvserver --config /etc/epochkv.yaml
        options from a file, the environment and flags; the later source wins

Options (in a file: "memory: 4GiB"; in the environment: KVSERVER_MEMORY=4GiB):
` + o.flags.FlagUsagesWrapped(110)
}

// LogValue is the effective configuration, under the options' names.
func (c Config) LogValue() slog.Value {
	var attrs []slog.Attr
	for _, o := range c.Options() {
		attrs = append(attrs, slog.String(o.Name, o.Value))
	}
	return slog.GroupValue(attrs...)
}

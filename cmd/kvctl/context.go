package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

const (
	contextEnv  = "KVCTL_CONTEXT"
	contextsEnv = "KVCTL_CONFIG"
)

// serverContext is how to reach one server.
type serverContext struct {
	Endpoint string `json:"endpoint"`
	tlsSettings
}

// contexts is the file of contexts.
type contexts struct {
	Current  string                   `json:"current,omitempty"`
	Contexts map[string]serverContext `json:"contexts"`
}

// contextsFile is where contexts are kept, or empty if the environment names no directory.
func (a *app) contextsFile() string {
	if file := a.getenv(contextsEnv); file != "" {
		return file
	}
	if dir := a.getenv("XDG_CONFIG_HOME"); dir != "" {
		return filepath.Join(dir, "epochkv", "contexts.json")
	}
	if home := a.getenv("HOME"); home != "" {
		return filepath.Join(home, ".config", "epochkv", "contexts.json")
	}
	return ""
}

// readContexts reads the file. Without one there are no contexts.
func (a *app) readContexts() (*contexts, error) {
	all := &contexts{Contexts: map[string]serverContext{}}
	name := a.contextsFile()
	if name == "" {
		return all, nil
	}
	info, err := os.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return nil, fmt.Errorf("contexts: %w", err)
	}
	if info.Mode()&fs.ModeDevice != 0 { // /dev/null: no contexts
		return all, nil
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("contexts: other accounts may use %s (mode %v); take that away with: chmod 600 %s", name, info.Mode().Perm(), name)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("contexts: %w", err)
	}
	if err := json.Unmarshal(text, all); err != nil {
		return nil, fmt.Errorf("contexts: %s cannot be read: %w; correct it, or remove it to begin anew", name, err)
	}
	if all.Contexts == nil {
		all.Contexts = map[string]serverContext{}
	}
	return all, nil
}

// find returns a context; an empty name is the current one, if there is one.
func (c *contexts) find(name string) (serverContext, error) {
	if name == "" && c.Current == "" {
		return serverContext{}, nil
	}
	if name == "" {
		name = c.Current
	}
	found, ok := c.Contexts[name]
	if !ok {
		return found, fmt.Errorf("there is no context %q; \"kvctl context list\" shows them, \"kvctl context add\" makes one", name)
	}
	return found, nil
}

// writeContexts replaces the file as a whole.
func (a *app) writeContexts(all *contexts) error {
	name := a.contextsFile()
	if name == "" {
		return fmt.Errorf("contexts: there is no directory for them; set %s to a file, or HOME", contextsEnv)
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	err = os.MkdirAll(filepath.Dir(name), 0o700)
	if err == nil {
		err = replaceFile(name, append(text, '\n'), true)
	}
	if err != nil {
		return fmt.Errorf("contexts: %w", err)
	}
	return nil
}

func (a *app) contextCommand() *cobra.Command {
	group := &cobra.Command{
		Use:   "context",
		Short: "Keep endpoints, TLS settings and tokens under names",
		Long: `Keep endpoints, TLS settings and tokens under names. They are in a file of mode 0600: $` + contextsEnv + `, or epochkv/contexts.json in
$XDG_CONFIG_HOME or ~/.config. A command uses the context of --context or $` + contextEnv + `, or the one that "kvctl context use" chose
unless --endpoint or $` + endpointEnv + ` is given. Flags override settings of a context.`,
		Example: `  kvctl context add prod --endpoint db1.example:7400 --tls-ca ca.crt --tls-cert client.crt --tls-key client.key
  kvctl context use prod
  kvctl context list`,
	}
	group.AddCommand(
		&cobra.Command{
			Use: "add NAME", Short: "Keep the given --endpoint and --tls settings as a context; the first one becomes the current one",
			Example: "  kvctl context add prod --endpoint db1.example:7400 --tls-ca ca.crt",
			Args:    cobra.ExactArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				return a.changeContexts(func(all *contexts) error { return a.addContext(all, args[0]) })
			},
		},
		&cobra.Command{
			Use: "use NAME", Short: "Choose the context of commands that name none", Example: "  kvctl context use prod", Args: cobra.ExactArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				return a.changeContexts(func(all *contexts) error {
					_, err := all.find(args[0])
					all.Current = args[0]
					return err
				})
			},
		},
		&cobra.Command{
			Use: "list", Short: "List the contexts", Example: "  kvctl context list", Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error { return a.listContexts() },
		},
		&cobra.Command{
			Use: "remove NAME", Short: "Remove a context", Example: "  kvctl context remove prod", Args: cobra.ExactArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				return a.changeContexts(func(all *contexts) error {
					_, err := all.find(args[0])
					delete(all.Contexts, args[0])
					if all.Current == args[0] {
						all.Current = ""
					}
					return err
				})
			},
		},
	)
	return group
}

// changeContexts reads the contexts, changes and writes them.
func (a *app) changeContexts(change func(*contexts) error) error {
	all, err := a.readContexts()
	if err != nil {
		return err
	}
	if err := change(all); err != nil {
		return err
	}
	return a.writeContexts(all)
}

func (a *app) addContext(all *contexts, name string) error {
	if _, exists := all.Contexts[name]; exists || name == "" {
		return usageError{fmt.Errorf("a context %q exists already, or the name is empty; remove it first, or choose another name", name)}
	}
	added := serverContext{Endpoint: a.endpoint, tlsSettings: a.tls}
	added.Token = "" // of the environment: it may be for another server, and kvctl login gets one for this one
	if err := added.absolute(); err != nil {
		return err
	}
	all.Contexts[name] = added
	if len(all.Contexts) == 1 {
		all.Current = name
	}
	return nil
}

// listContexts marks the current context with an asterisk.
func (a *app) listContexts() error {
	all, err := a.readContexts()
	if err != nil {
		return err
	}
	table := a.formatOr(formatJSONL) == formatTable
	for _, name := range slices.Sorted(maps.Keys(all.Contexts)) {
		c := all.Contexts[name]
		if table {
			mark := " "
			if name == all.Current {
				mark = "*"
			}
			if err := a.print("%s %s  %s  %s\n", mark, name, c.Endpoint, c.describe()); err != nil {
				return err
			}
			continue
		}
		c.Token = "" // a secret
		line, err := json.Marshal(struct {
			Name    string `json:"name"`
			Current bool   `json:"current"`
			serverContext
		}{name, name == all.Current, c})
		if err == nil {
			err = a.print("%s\n", line)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *tlsSettings) describe() string {
	var parts []string
	for _, one := range s.all() {
		switch {
		case one.yes != nil && *one.yes:
			parts = append(parts, "--"+one.flag)
		case one.flag == "": // a token is not shown
		case one.text != nil && *one.text != "":
			parts = append(parts, "--"+one.flag+" "+*one.text)
		}
	}
	return strings.Join(parts, " ")
}

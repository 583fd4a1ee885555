package main

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show and change the options of the server",
		Long: `Show and change the options of the server. cache-size, log-level, slow-request-threshold and trace-ratio can be changed while it runs; all
others take a restart. Certificates are read again by kvctl tls reload.`,
		Example: "  kvctl config get --changed\n  kvctl config set log-level debug\n  kvctl config reload",
	}
	var changed bool
	get := &cobra.Command{
		Use:   "get [OPTION...]",
		Short: "Show options with their values and where these come from",
		Long: `Show options of the running server with their values, and where these come from: the default, a flag, the environment, or a line of a file.
Without names it shows all. 0B is a size that the server derives from --memory.`,
		Example: `  kvctl config get
  kvctl config get memory cache-size
  kvctl config get --changed -o json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *client.Client) error { return a.printConfig(cmd, c, args, changed) })
		},
	}
	get.Flags().BoolVar(&changed, "changed", false, "leave out options that have their default")
	cmd.AddCommand(get, a.configSetCommand(), a.configReloadCommand())
	return cmd
}

func (a *app) configSetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "set OPTION VALUE",
		Short: "Change an option while the server runs",
		Long: `Change cache-size, log-level, slow-request-threshold or trace-ratio while the server runs. The change lasts until the server ends, or until kvctl
config reload: to keep it, write it into the configuration file, too.`,
		Example: "  kvctl config set log-level debug\n  kvctl config set slow-request-threshold 20ms\n  kvctl config set cache-size 2GiB",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *client.Client) error {
				done, err := c.SetConfig(cmd.Context(), args[0], args[1])
				if err != nil {
					return err
				}
				return a.printConfigChanges([]*kvpb.ConfigChange{done}, nil)
			})
		},
	}
}

func (a *app) configReloadCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Let the server read its configuration file again",
		Long: `Let the server read its configuration file again, as SIGHUP does. Options that can be changed while it runs change at once; those that take a restart
are named. Flags and environment variables win over the file, as at the start. If anything in the file is wrong, nothing changes.`,
		Example: "  kvctl config reload",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				done, err := c.ReloadConfig(cmd.Context())
				if err != nil {
					return err
				}
				return a.printConfigChanges(done.GetChanged(), done.GetRestartNeeded())
			})
		},
	}
}

// changeRow is the change of an option as JSON shows it.
type changeRow struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Previous  string `json:"previous"`
	Effective string `json:"effective"` // "now", or "next start"
}

func (a *app) printConfigChanges(now, later []*kvpb.ConfigChange) error {
	rows, table := []changeRow{}, [][]string{{"OPTION", "VALUE", "BEFORE", "EFFECTIVE"}}
	for i, c := range slices.Concat(now, later) {
		row := changeRow{Name: c.GetName(), Value: c.GetValue(), Previous: c.GetPrevious(), Effective: "now"}
		if i >= len(now) {
			row.Effective = "next start"
		}
		rows = append(rows, row)
		table = append(table, []string{row.Name, row.Value, row.Previous, row.Effective})
	}
	if printed, err := printReport(a, rows); printed {
		return err
	}
	if len(rows) == 0 {
		return a.print("nothing changed\n")
	}
	return a.writeTable(table)
}

// optionRow is an option as JSON shows it.
type optionRow struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

func (a *app) printConfig(cmd *cobra.Command, c *client.Client, names []string, changed bool) error {
	all, err := c.Config(cmd.Context())
	if err != nil {
		return err
	}
	known, rows, table := []string{}, []optionRow{}, [][]string{{"OPTION", "VALUE", "FROM"}}
	for _, o := range all {
		known = append(known, o.GetName())
		if len(names) > 0 && !slices.Contains(names, o.GetName()) || changed && o.GetOrigin() == "default" {
			continue
		}
		rows = append(rows, optionRow{Name: o.GetName(), Value: o.GetValue(), Origin: o.GetOrigin()})
		table = append(table, []string{o.GetName(), o.GetValue(), o.GetOrigin()})
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return usageError{fmt.Errorf("the server has no option %q; kvctl config get shows all", name)}
		}
	}
	if printed, err := printReport(a, rows); printed {
		return err
	}
	return a.writeTable(table)
}

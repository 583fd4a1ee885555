package main

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show the options of the server",
		Long: `Show the options of the server. What can be changed while it runs has commands of its own: the size of the page cache (kvctl resize-cache),
the certificates (kvctl tls reload, or SIGHUP), and users. All other options take a restart.`,
		Example: "  kvctl config get --changed",
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
	cmd.AddCommand(get)
	return cmd
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
	if printed, err := printRows(a, rows); printed {
		return err
	}
	return a.writeTable(table)
}

package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) roleCommand() *cobra.Command {
	group := &cobra.Command{
		Use:   "role",
		Short: "Manage roles",
		Long: `Make, show, change and remove roles. A role gives rights to ranges of keys, and administrative actions. Rights are letters: r to read values, history
and changes; w to set and delete; l to attach keys to leases and to acquire locks of these names. The role root has all rights.`,
		Example: "  kvctl role create reader --grant r:\n  kvctl role create tenant1 --grant rwl:tenant/1/ --action observe\n  kvctl role list",
	}
	group.AddCommand(
		a.roleSetCommand("create", "Make a role", "Make a role with rights to keys and administrative actions.", (*client.Client).CreateRole),
		a.roleSetCommand("update", "Replace the rights of a role", "Replace the rights of a role, for all users that have it, also in requests that are under way.", (*client.Client).UpdateRole),
		&cobra.Command{
			Use:     "delete NAME",
			Short:   "Remove a role, also from the users that have it",
			Long:    `Remove a role, also from the users that have it.`,
			Example: "  kvctl role delete tenant1",
			Args:    cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				return a.withClient(func(c *client.Client) error { return c.DeleteRole(cmd.Context(), args[0]) })
			},
		},
		a.roleListCommand(),
	)
	return group
}

func (a *app) roleSetCommand(verb, short, long string, set func(*client.Client, context.Context, *kvpb.Role) error) *cobra.Command {
	var rights grantFlags
	cmd := &cobra.Command{
		Use:     verb + " NAME",
		Short:   short,
		Long:    long,
		Example: "  kvctl role " + verb + " tenant1 --grant rw:tenant/1/ --range r:a..f --action observe",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			grants, err := rights.grants(a)
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error {
				return set(c, cmd.Context(), &kvpb.Role{Name: args[0], Grants: grants, Actions: rights.actions})
			})
		},
	}
	rights.add(cmd)
	return cmd
}

func (a *app) roleListCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the roles and their rights",
		Long:    `List the roles by name, with their rights.`,
		Example: "  kvctl role list",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				all, err := c.Roles(cmd.Context())
				if err != nil {
					return err
				}
				type row struct {
					Name    string     `json:"name"`
					Grants  []grantRow `json:"grants"`
					Actions []string   `json:"actions"`
				}
				rows, table := make([]row, len(all)), [][]string{{"NAME", "ACTIONS", "RIGHTS"}}
				for i, r := range all {
					rows[i] = row{Name: r.GetName(), Grants: append([]grantRow{}, a.grantRows(r.GetGrants())...), Actions: append([]string{}, r.GetActions()...)}
					var rights []string
					for _, g := range rows[i].Grants {
						rights = append(rights, g.String())
					}
					table = append(table, []string{r.GetName(), strings.Join(r.GetActions(), ","), strings.Join(rights, "; ")})
				}
				if printed, err := printRows(a, rows); printed {
					return err
				}
				return a.writeTable(table)
			})
		},
	}
}

package main

import (
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) tokenCommand() *cobra.Command {
	group := &cobra.Command{
		Use:     "token",
		Short:   "Manage tokens",
		Long:    `Make, list and revoke tokens, your own or with the action "users" those of others. A token is shown once; the server keeps its SHA-256.`,
		Example: "  (umask 077; kvctl token create --user exporter --label nightly > token)\n  kvctl token list\n  kvctl token revoke 3f2a9c0d1e4b5a67",
	}
	group.AddCommand(a.tokenCreateCommand(), a.tokenListCommand(), &cobra.Command{
		Use:     "revoke ID",
		Short:   "Revoke a token",
		Long:    `Revoke a token. Requests with it are refused from then on, and its streams end. "kvctl token list" shows the ids.`,
		Example: "  kvctl token revoke 3f2a9c0d1e4b5a67",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *client.Client) error { return c.RevokeToken(cmd.Context(), args[0]) })
		},
	})
	return group
}

func (a *app) tokenCreateCommand() *cobra.Command {
	request := &kvpb.CreateTokenRequest{}
	var lifetime time.Duration
	cmd := &cobra.Command{
		Use:     "create",
		Short:   "Make a token, and print it",
		Long:    `Make a token for a program, and print it. It is not stored, and cannot be shown again.`,
		Example: "  (umask 077; kvctl token create --user exporter --label nightly --lifetime 2160h > token)",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("lifetime") {
				request.Lifetime = durationpb.New(lifetime)
			}
			return a.withClient(func(c *client.Client) error {
				made, err := c.CreateToken(cmd.Context(), request)
				if err != nil {
					return err
				}
				return a.printToken(made.GetToken())
			})
		},
	}
	cmd.Flags().StringVar(&request.User, "user", "", "the user `NAME` that it is for (default: your own)")
	cmd.Flags().StringVar(&request.Label, "label", "", "`TEXT` that lists show")
	cmd.Flags().DurationVar(&lifetime, "lifetime", 0, "`TIME` for which it is valid (default: until it is revoked)")
	return cmd
}

func (a *app) tokenListCommand() *cobra.Command {
	request := &kvpb.ListTokensRequest{}
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List tokens",
		Long:    `List your tokens, those of --user or --all. LAST USED is to the hour.`,
		Example: "  kvctl token list --all",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				all, err := c.Tokens(cmd.Context(), request)
				if err != nil {
					return err
				}
				type row struct {
					ID       string `json:"id"`
					User     string `json:"user"`
					Label    string `json:"label,omitempty"`
					Login    bool   `json:"login,omitempty"`
					Created  string `json:"created"`
					Expires  string `json:"expires,omitempty"`
					LastUsed string `json:"last_used,omitempty"`
				}
				rows, table := make([]row, len(all)), [][]string{{"ID", "USER", "LABEL", "EXPIRES", "LAST USED"}}
				for i, k := range all {
					rows[i] = row{k.GetId(), k.GetUser(), k.GetLabel(), k.GetSession(), timeCell(k.GetCreated()), timeCell(k.GetExpires()), timeCell(k.GetLastUsed())}
					table = append(table, []string{k.GetId(), k.GetUser(), k.GetLabel(), orDash(rows[i].Expires), orDash(rows[i].LastUsed)})
				}
				if printed, err := printRows(a, rows); printed {
					return err
				}
				return a.writeTable(table)
			})
		},
	}
	cmd.Flags().StringVar(&request.User, "user", "", "those of the user `NAME`")
	cmd.Flags().BoolVar(&request.All, "all", false, "those of all users")
	cmd.MarkFlagsMutuallyExclusive("user", "all")
	return cmd
}

// timeCell is a time as lists show it, or empty.
func timeCell(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().Format(time.RFC3339)
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/keys"
)

func (a *app) loginCommand() *cobra.Command {
	var lifetime time.Duration
	var label string
	var show bool
	cmd := &cobra.Command{
		Use:   "login USER",
		Short: "Get a token for a user's password",
		Long: `Exchange a password, which is read from the terminal or from standard input, for a token. The token is kept in the context that the command uses,
in a file of mode 0600, and later commands send it. Without a context, or with --print, it is printed instead: put it into a file for --token-file, or into KVCTL_TOKEN.`,
		Example: "  kvctl login ann\n  (umask 077; kvctl login ann --print < password > token)\n  kvctl --token-file token status",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			password, err := a.readSecret(cmd.Context(), "Password of "+args[0])
			if err != nil {
				return err
			}
			a.tls.Token, a.tls.TokenFile = "", "" // one that has expired would not help
			return a.withClient(func(c *client.Client) error {
				token, expires, err := c.Login(cmd.Context(), args[0], password, label, lifetime)
				if err != nil {
					return err
				}
				if show || a.chosen == "" {
					return a.printToken(token)
				}
				if err := a.keepToken(token); err != nil {
					return err
				}
				return a.print("context %s is logged in as %s until %s\n", a.chosen, args[0], expires.Local().Format(time.DateTime))
			})
		},
	}
	cmd.Flags().DurationVar(&lifetime, "lifetime", 0, "`TIME` for which the token is valid, up to 720h (default: 12h)")
	cmd.Flags().StringVar(&label, "label", "kvctl login", "`TEXT` that lists of tokens show")
	cmd.Flags().BoolVar(&show, "print", false, "print the token, and keep it nowhere")
	return cmd
}

// keepToken writes a token into the context that is used.
func (a *app) keepToken(token string) error {
	return a.changeContexts(func(all *contexts) error {
		c, err := all.find(a.chosen)
		c.Token, c.TokenFile = token, ""
		all.Contexts[a.chosen] = c
		return err
	})
}

// forgetToken removes the token that was sent from the context that is used, if it is from there.
func (a *app) forgetToken() error {
	return a.changeContexts(func(all *contexts) error {
		c, err := all.find(a.chosen)
		if c.Token == a.tls.Token && c.TokenFile == a.tls.TokenFile {
			c.Token, c.TokenFile = "", ""
			all.Contexts[a.chosen] = c
		}
		return err
	})
}

func (a *app) logoutCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "logout",
		Short:   "Revoke the token that commands send",
		Long:    `Revoke the token that commands send, and remove it from the context that the command uses, if it is the one of the context.`,
		Example: "  kvctl logout",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				if err := c.Logout(cmd.Context()); err != nil {
					return err
				}
				if a.chosen == "" {
					return nil
				}
				return a.forgetToken()
			})
		},
	}
}

func (a *app) authCommand() *cobra.Command {
	group := &cobra.Command{
		Use:     "auth",
		Short:   "Begin or end that users are checked, and explain rights",
		Example: "  kvctl auth status\n  kvctl auth enable\n  kvctl auth explain bob --grant rw:tenant/1/",
	}
	simple := func(use, short, long string, do func(cmd *cobra.Command, c *client.Client) error) *cobra.Command {
		return &cobra.Command{
			Use: use, Short: short, Long: long, Example: "  kvctl auth " + use, Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return a.withClient(func(c *client.Client) error { return do(cmd, c) })
			},
		}
	}
	group.AddCommand(
		simple("enable", "Begin to check users", `From now on every request needs a token or a certificate of a user that has the rights for it. Your own user must have all rights: it cannot lock itself out.`,
			func(cmd *cobra.Command, c *client.Client) error { return c.EnableUsers(cmd.Context()) }),
		simple("disable", "End that users are checked", `From now on every client that can connect may read, write and administer everything. Users, roles and tokens stay.`,
			func(cmd *cobra.Command, c *client.Client) error { return c.DisableUsers(cmd.Context()) }),
		simple("status", "Show whether users are checked, and what you may do", `Show whether the server checks users, as which user it knows you, and what that user may do.`, a.authStatus),
		a.explainCommand(),
	)
	return group
}

// grantRow is a range with rights as JSON shows it.
type grantRow struct {
	Rights string `json:"rights"`
	Start  string `json:"start"`
	End    string `json:"end,omitempty"`
}

func (a *app) grantRows(grants []*kvpb.KeyGrant) (rows []grantRow) {
	for _, g := range grants {
		rights := ""
		for _, one := range []struct {
			given  bool
			letter string
		}{{g.GetRead(), "r"}, {g.GetWrite(), "w"}, {g.GetLease(), "l"}} {
			if one.given {
				rights += one.letter
			}
		}
		row := grantRow{Rights: rights, Start: a.cell(g.GetStart())}
		if len(g.GetEnd()) > 0 {
			row.End = a.cell(g.GetEnd())
		}
		rows = append(rows, row)
	}
	return rows
}

// String is how a table shows a range.
func (g grantRow) String() string {
	switch {
	case g.Start == "" && g.End == "":
		return g.Rights + " all keys"
	case g.End == "":
		return g.Rights + " from " + g.Start + " on"
	}
	return fmt.Sprintf("%s from %s to %s", g.Rights, cmp.Or(g.Start, "the first key"), g.End)
}

func (a *app) authStatus(cmd *cobra.Command, c *client.Client) error {
	who, err := c.WhoAmI(cmd.Context())
	if err != nil {
		return err
	}
	row := struct {
		Enabled  bool       `json:"enabled"`
		Revision uint64     `json:"revision"`
		User     string     `json:"user,omitempty"`
		Method   string     `json:"method,omitempty"`
		Expires  string     `json:"expires,omitempty"`
		Roles    []string   `json:"roles,omitempty"`
		Grants   []grantRow `json:"grants,omitempty"`
		Actions  []string   `json:"actions,omitempty"`
	}{Enabled: who.GetEnabled(), Revision: who.GetRevision(), User: who.GetUser(), Method: who.GetMethod(), Roles: who.GetRoles(), Grants: a.grantRows(who.GetGrants()), Actions: who.GetActions()}
	if who.GetExpires() != nil {
		row.Expires = who.GetExpires().AsTime().Format(time.RFC3339)
	}
	if format := a.formatOr(formatTable); printsJSON(format) {
		return a.printJSON(format, row)
	}
	checked := "not checked: every client may do everything"
	if row.Enabled {
		checked = "checked"
	}
	table := [][]string{{"users", checked}, {"you", cmp.Or(row.User, "not known")}}
	if row.User != "" {
		table = append(table, []string{"by", row.Method}, []string{"until", cmp.Or(row.Expires, "revoked")}, []string{"roles", strings.Join(row.Roles, ", ")})
		for _, g := range row.Grants {
			table = append(table, []string{"may", g.String()})
		}
		table = append(table, []string{"actions", strings.Join(row.Actions, ", ")})
	}
	return writeRows(a.out, table, make([]int, 2))
}

func (a *app) explainCommand() *cobra.Command {
	var wanted grantFlags
	cmd := &cobra.Command{
		Use:   "explain [USER]",
		Short: "Tell whether a user may do something",
		Long: `Tell whether USER, or your own user, has rights to keys and actions, and if not, which one is missing. Rights are letters: r read, w write, l lease.
The exit code is 9 if one is missing.`,
		Example: "  kvctl auth explain bob --grant rw:tenant/1/\n  kvctl auth explain --action backup",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			grants, err := wanted.grants(a)
			if err != nil {
				return err
			}
			if len(grants)+len(wanted.actions) == 0 {
				return usageError{fmt.Errorf("nothing is asked about; expected --grant, --range or --action")}
			}
			request := &kvpb.ExplainRequest{Grants: grants, Actions: wanted.actions}
			if len(args) > 0 {
				request.User = args[0]
			}
			return a.withClient(func(c *client.Client) error {
				answer, err := c.Explain(cmd.Context(), request)
				if err != nil {
					return err
				}
				if format := a.formatOr(formatTable); printsJSON(format) {
					err = a.printJSON(format, struct {
						Permitted bool   `json:"permitted"`
						Missing   string `json:"missing,omitempty"`
						Text      string `json:"text,omitempty"`
					}{answer.GetPermitted(), answer.GetMissing(), answer.GetText()})
				} else {
					err = a.print("%s\n", cmp.Or(answer.GetText(), "permitted"))
				}
				if err == nil && !answer.GetPermitted() {
					err = commandError{code: exitDenied}
				}
				return err
			})
		},
	}
	wanted.add(cmd)
	return cmd
}

// grantFlags are rights to keys and actions on a command line.
type grantFlags struct{ prefixes, ranges, actions []string }

func (g *grantFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&g.prefixes, "grant", nil, "`RIGHTS:PREFIX`: rights (letters of r, w, l) to all keys with a prefix, or to all keys without one; may be repeated")
	cmd.Flags().StringArrayVar(&g.ranges, "range", nil, "`RIGHTS:BOUNDS`: rights to the keys within BOUNDS, START..END: from START to before END, either of which may be empty; may be repeated")
	cmd.Flags().StringSliceVar(&g.actions, "action", nil, "`ACTIONS`: observe, operate, backup, users, debug or all, with commas")
}

// grants reads the flags.
func (g *grantFlags) grants(a *app) (all []*kvpb.KeyGrant, err error) {
	for _, text := range g.prefixes {
		grant, prefix, err := parseRights("--grant", text)
		if err != nil {
			return nil, err
		}
		if grant.Start, err = a.bytesArg(prefix); err != nil {
			return nil, err
		}
		grant.End, _ = keys.Successor(nil, grant.GetStart())
		all = append(all, grant)
	}
	for _, text := range g.ranges {
		grant, bounds, err := parseRights("--range", text)
		if err != nil {
			return nil, err
		}
		start, end, ok := strings.Cut(bounds, "..")
		if !ok {
			return nil, usageError{fmt.Errorf("--range %s: has no \"..\" between its bounds; expected RIGHTS:START..END", text)}
		}
		if grant.Start, err = a.bytesArg(start); err != nil {
			return nil, err
		}
		if grant.End, err = a.bytesArg(end); err != nil {
			return nil, err
		}
		all = append(all, grant)
	}
	return all, nil
}

func parseRights(flag, text string) (*kvpb.KeyGrant, string, error) {
	letters, rest, ok := strings.Cut(text, ":")
	grant := &kvpb.KeyGrant{}
	for _, letter := range letters {
		switch letter {
		case 'r':
			grant.Read = true
		case 'w':
			grant.Write = true
		case 'l':
			grant.Lease = true
		default:
			ok = false
		}
	}
	if !ok || letters == "" {
		return nil, "", usageError{fmt.Errorf("%s %s: does not begin with rights; expected letters of r, w and l, and a colon", flag, text)}
	}
	return grant, rest, nil
}

package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) userCommand() *cobra.Command {
	group := &cobra.Command{
		Use:   "user",
		Short: "Manage users",
		Long: `Make, show, change and remove users. A user has roles, which have rights. Passwords are read from the terminal, or from standard input, a line each.
The first user is made by "kvctl user bootstrap".`,
		Example: "  kvctl user bootstrap ann\n  kvctl user create bob --role reader\n  kvctl user list",
	}
	group.AddCommand(a.userBootstrapCommand(), a.userCreateCommand(), a.userUpdateCommand(), a.userPasswordCommand(), a.userDeleteCommand(), a.userListCommand(), a.userShowCommand())
	return group
}

func (a *app) userBootstrapCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "bootstrap NAME",
		Short: "Make the first user with all rights",
		Long: `Make the first user with all rights. The server prints a token for it at its start, as long as there is no such user. The token, and then the password
of the new user, are read from the terminal or from standard input, a line each.`,
		Example: "  kvctl user bootstrap ann\n  kvctl login ann\n  kvctl auth enable",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			token, err := a.readSecret(cmd.Context(), "The token that the server has printed (bootstrap_token)")
			if err != nil {
				return err
			}
			password, err := a.readNewPassword(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.withClient(func(c *client.Client) error { return c.Bootstrap(cmd.Context(), token, args[0], password) })
		},
	}
}

// limitFlags are the limits of a user on a command line.
type limitFlags struct {
	requests, streams, watches, transactions uint32
	bytesIn, bytesOut                        uint64
}

func (l *limitFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Uint32Var(&l.requests, "max-requests", 0, "`N` requests a second; 0 is no limit, here and below")
	f.Uint64Var(&l.bytesIn, "max-bytes-in", 0, "`BYTES` of requests a second")
	f.Uint64Var(&l.bytesOut, "max-bytes-out", 0, "`BYTES` of answers a second")
	f.Uint32Var(&l.streams, "max-streams", 0, "`N` open streams")
	f.Uint32Var(&l.watches, "max-watches", 0, "`N` open watches")
	f.Uint32Var(&l.transactions, "max-transactions", 0, "`N` open transactions")
}

func (l *limitFlags) message() *kvpb.UserLimits {
	return &kvpb.UserLimits{Requests: l.requests, BytesIn: l.bytesIn, BytesOut: l.bytesOut, Streams: l.streams, Watches: l.watches, Transactions: l.transactions}
}

// change is the limits of a user after the flags that were given; nil if none was.
func (l *limitFlags) change(cmd *cobra.Command, before *kvpb.UserLimits) *kvpb.UserLimits {
	after := &kvpb.UserLimits{
		Requests: before.GetRequests(), BytesIn: before.GetBytesIn(), BytesOut: before.GetBytesOut(),
		Streams: before.GetStreams(), Watches: before.GetWatches(), Transactions: before.GetTransactions(),
	}
	given := false
	for name, take := range map[string]func(){
		"max-requests":     func() { after.Requests = l.requests },
		"max-bytes-in":     func() { after.BytesIn = l.bytesIn },
		"max-bytes-out":    func() { after.BytesOut = l.bytesOut },
		"max-streams":      func() { after.Streams = l.streams },
		"max-watches":      func() { after.Watches = l.watches },
		"max-transactions": func() { after.Transactions = l.transactions },
	} {
		if cmd.Flags().Changed(name) {
			given = true
			take()
		}
	}
	if !given {
		return nil
	}
	return after
}

func (a *app) userCreateCommand() *cobra.Command {
	var roles []string
	var none bool
	var limits limitFlags
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Make a user",
		Long: `Make a user. Its password is read from the terminal, twice, or from standard input. With --no-password it cannot log in: make tokens for it, or let
the name be that of a client certificate (kvserver --tls-client-user).`,
		Example: "  kvctl user create bob --role reader\n  kvctl user create exporter --role reader --no-password --max-requests 100",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			request := &kvpb.CreateUserRequest{Name: args[0], Roles: roles, Limits: limits.message()}
			if !none {
				var err error
				if request.Password, err = a.readNewPassword(cmd.Context(), args[0]); err != nil {
					return err
				}
			}
			return a.withClient(func(c *client.Client) error { return c.CreateUser(cmd.Context(), request) })
		},
	}
	cmd.Flags().StringSliceVar(&roles, "role", nil, "`ROLES` of the user, with commas; may be repeated")
	cmd.Flags().BoolVar(&none, "no-password", false, "the user has tokens or a certificate only")
	limits.add(cmd)
	return cmd
}

func (a *app) userUpdateCommand() *cobra.Command {
	var add, remove []string
	var enable, disable bool
	var limits limitFlags
	cmd := &cobra.Command{
		Use:     "update NAME",
		Short:   "Change roles and limits of a user, or disable it",
		Long:    `Change roles and limits of a user, or disable it: its requests are then refused, and its streams end. What no flag names stays.`,
		Example: "  kvctl user update bob --add-role writer --remove-role reader\n  kvctl user update bob --disable",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *client.Client) error {
				u, err := a.findUser(cmd, c, args[0])
				if err != nil {
					return err
				}
				request := &kvpb.UpdateUserRequest{Name: args[0], AddRoles: add, RemoveRoles: remove, Limits: limits.change(cmd, u.GetLimits())}
				if enable || disable {
					request.Disabled = &disable
				}
				return c.UpdateUser(cmd.Context(), request)
			})
		},
	}
	cmd.Flags().StringSliceVar(&add, "add-role", nil, "`ROLES` that the user gets, with commas")
	cmd.Flags().StringSliceVar(&remove, "remove-role", nil, "`ROLES` that it loses")
	cmd.Flags().BoolVar(&disable, "disable", false, "refuse its requests")
	cmd.Flags().BoolVar(&enable, "enable", false, "accept them again")
	cmd.MarkFlagsMutuallyExclusive("enable", "disable")
	limits.add(cmd)
	return cmd
}

func (a *app) userPasswordCommand() *cobra.Command {
	var remove, current bool
	cmd := &cobra.Command{
		Use:   "password [NAME]",
		Short: "Change a password",
		Long: `Change the password of NAME, or your own. The tokens that logins of the user have made are revoked. With --current, which a user without the action
"users" needs for its own, the password before is read first.`,
		Example: "  kvctl user password --current\n  kvctl user password bob\n  kvctl user password bob --remove",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			request, of := &kvpb.SetPasswordRequest{Remove: remove}, "your user"
			if len(args) > 0 {
				request.User, of = args[0], args[0]
			}
			if current {
				if request.CurrentPassword, err = a.readSecret(cmd.Context(), "Current password of "+of); err != nil {
					return err
				}
			}
			if !remove {
				if request.Password, err = a.readNewPassword(cmd.Context(), of); err != nil {
					return err
				}
			}
			return a.withClient(func(c *client.Client) error { return c.SetPassword(cmd.Context(), request) })
		},
	}
	cmd.Flags().BoolVar(&remove, "remove", false, "the user has no password afterwards, and cannot log in")
	cmd.Flags().BoolVar(&current, "current", false, "also read the password before")
	return cmd
}

func (a *app) userDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "delete NAME",
		Short:   "Remove a user and its tokens",
		Long:    `Remove a user and its tokens. Its streams end.`,
		Example: "  kvctl user delete bob",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *client.Client) error { return c.DeleteUser(cmd.Context(), args[0]) })
		},
	}
}

// userRow is a user as JSON shows it.
type userRow struct {
	Name     string            `json:"name"`
	Roles    []string          `json:"roles"`
	Disabled bool              `json:"disabled,omitempty"`
	Password bool              `json:"has_password"`
	Created  string            `json:"created"`
	Limits   map[string]uint64 `json:"limits,omitempty"`
}

func userRowOf(u *kvpb.User) userRow {
	row := userRow{Name: u.GetName(), Roles: append([]string{}, u.GetRoles()...), Disabled: u.GetDisabled(), Password: u.GetHasPassword(), Created: u.GetCreated().AsTime().Format(time.RFC3339)}
	l := u.GetLimits()
	for name, limit := range map[string]uint64{
		"requests": uint64(l.GetRequests()), "bytes_in": l.GetBytesIn(), "bytes_out": l.GetBytesOut(),
		"streams": uint64(l.GetStreams()), "watches": uint64(l.GetWatches()), "transactions": uint64(l.GetTransactions()),
	} {
		if limit > 0 {
			if row.Limits == nil {
				row.Limits = map[string]uint64{}
			}
			row.Limits[name] = limit
		}
	}
	return row
}

func (a *app) userListCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the users",
		Long:    `List the users by name.`,
		Example: "  kvctl user list -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				all, err := c.Users(cmd.Context())
				if err != nil {
					return err
				}
				rows, table := make([]userRow, len(all)), [][]string{{"NAME", "ROLES", "STATE", "CREATED"}}
				for i, u := range all {
					rows[i] = userRowOf(u)
					state := "active"
					switch {
					case rows[i].Disabled:
						state = "disabled"
					case !rows[i].Password:
						state = "no password"
					}
					table = append(table, []string{u.GetName(), strings.Join(u.GetRoles(), ","), state, rows[i].Created})
				}
				if printed, err := printRows(a, rows); printed {
					return err
				}
				return a.writeTable(table)
			})
		},
	}
}

func (a *app) userShowCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "show NAME",
		Short:   "Show a user and its limits",
		Long:    `Show a user and its limits.`,
		Example: "  kvctl user show bob",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *client.Client) error {
				u, err := a.findUser(cmd, c, args[0])
				if err != nil {
					return err
				}
				row := userRowOf(u)
				if format := a.formatOr(formatTable); printsJSON(format) {
					return a.printJSON(format, row)
				}
				table := [][]string{
					{"name", row.Name},
					{"roles", strings.Join(row.Roles, ", ")},
					{"disabled", strconv.FormatBool(row.Disabled)},
					{"password", strconv.FormatBool(row.Password)},
					{"created", row.Created},
				}
				for _, name := range []string{"requests", "bytes_in", "bytes_out", "streams", "watches", "transactions"} {
					if limit := row.Limits[name]; limit > 0 {
						table = append(table, []string{"limit", fmt.Sprintf("%s %d", strings.ReplaceAll(name, "_", " "), limit)})
					}
				}
				return writeRows(a.out, table, make([]int, 2))
			})
		},
	}
}

// findUser is a user by its name.
func (*app) findUser(cmd *cobra.Command, c *client.Client, name string) (*kvpb.User, error) {
	all, err := c.Users(cmd.Context())
	if err != nil {
		return nil, err
	}
	for _, u := range all {
		if u.GetName() == name {
			return u, nil
		}
	}
	return nil, fmt.Errorf("there is no user %s; kvctl user list shows those that exist: %w", name, errNotFound)
}

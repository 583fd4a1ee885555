package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/internal/auth/users"
)

func (a *app) offlineCommand() *cobra.Command {
	group := &cobra.Command{
		Use:     "offline",
		Short:   "Change the data directory of a server that does not run",
		Example: "  kvctl offline user reset ann --data-dir /var/lib/epochkv",
	}
	user := &cobra.Command{Use: "user", Short: "Undo a lock-out", Example: "  kvctl offline user reset ann --data-dir /var/lib/epochkv", Args: cobra.NoArgs}
	user.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	var dataDir string
	reset := &cobra.Command{
		Use:   "reset NAME --data-dir DIR",
		Short: "Make a user with all rights, or give it a new password",
		Long: `Give the user NAME all rights and a new password, in the data directory of a server that does not run; make the user if it does not exist. Its tokens are
revoked. Other users, and whether users are checked, stay as they are. A program that can write the data directory can do this: protect the directory.`,
		Example: "  kvctl offline user reset ann --data-dir /var/lib/epochkv",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dataDir == "" {
				return usageError{errors.New("offline user reset: give --data-dir")}
			}
			password, err := a.readNewPassword(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			ctx, cancel := a.longRunning(cmd) // the log may be replayed
			defer cancel()
			if err := users.ResetOffline(ctx, nil, dataDir, args[0], password); err != nil {
				return err
			}
			return a.print("user %s has all rights and the new password; start the server and log in\n", args[0])
		},
	}
	reset.Flags().StringVar(&dataDir, "data-dir", "", "change the files in this `DIR`; no server may run on it")
	user.AddCommand(reset)
	group.AddCommand(user)
	return group
}

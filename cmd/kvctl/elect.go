package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) electCommand() *cobra.Command {
	var f lockFlags
	var observe bool
	cmd := &cobra.Command{
		Use:   "elect NAME [VALUE]",
		Short: "Campaign in an election, or observe one",
		Long: `Campaign in the election NAME: wait until this process is the leader, print its fencing token, and lead until a signal comes. VALUE is what observers see
of the leader. If the leadership is lost, the exit code is 4.

With --observe, print the token and the value of the leader, now and after each change; 0 and nothing if there is none.`,
		Example: `  kvctl elect scheduler "$HOSTNAME:8080"
  kvctl elect scheduler --observe`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if observe {
				return a.observeElection(cmd, args[0])
			}
			if len(args) != 2 {
				return usageError{errors.New("elect: expected a NAME and a VALUE, or --observe")}
			}
			f.value = args[1]
			return a.withLock(cmd.Context(), args[0], &f, func(l *client.Lease, lock *client.Lock) error {
				if err := a.print("%d\n", lock.Token()); err != nil {
					return err
				}
				select {
				case <-cmd.Context().Done():
					return nil
				case <-l.Lost():
					return client.ErrLeaseLost
				}
			})
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&observe, "observe", false, "print the leaders instead of campaigning")
	return cmd
}

func (a *app) observeElection(cmd *cobra.Command, name string) error {
	key, err := a.bytesArg(name)
	if err != nil {
		return err
	}
	return a.withClient(func(c *client.Client) error {
		for holder, err := range c.ObserveLock(cmd.Context(), key) {
			if cmd.Context().Err() != nil {
				return nil
			}
			if err != nil {
				return err
			}
			if err := a.printHolder(uint64(holder.Token), holder.Value); err != nil {
				return err
			}
		}
		return nil
	})
}

// printHolder prints the leader of an election.
func (a *app) printHolder(token uint64, value []byte) error {
	if printsJSON(a.format) {
		return a.print("{\"token\":%d,%s}\n", token, appendJSONField(nil, "value", value, a.hex))
	}
	return a.print("%d %s\n", token, a.cell(value))
}

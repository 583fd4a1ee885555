package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// outcomeNames are the states of a request as the command prints them.
var outcomeNames = map[client.OutcomeState]string{
	client.Applied: "applied", client.Cancelled: "cancelled", client.NotApplied: "not-applied", client.Expired: "expired",
}

func (a *app) outcomeCommand() *cobra.Command {
	var fence bool
	cmd := &cobra.Command{
		Use:   "outcome REQUEST-ID",
		Short: "Tell what became of a write, by its request id",
		Long: `Tell what became of the write with this request id, a UUID of version 7:

  applied      it was executed, at the epoch that follows
  cancelled    it was not executed, and never will be
  not-applied  it was not executed so far; an attempt that is still under way may be
  expired      the server does not know any more (its option --request-id-window)

With --fence, a write that was not executed is cancelled. The exit code is 0 if it was applied, 4 if it was cancelled or not applied, and 1 if it is expired.`,
		Example: `  kvctl outcome 019a9e0c-2b7e-7c3a-9a55-3f0d2c1b4e6f
  kvctl outcome 019a9e0c-2b7e-7c3a-9a55-3f0d2c1b4e6f --fence -o json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := client.ParseRequestID(args[0])
			if err != nil {
				return usageError{fmt.Errorf("%q is not a request id: expected a UUID of version 7", args[0])}
			}
			return a.withClient(func(c *client.Client) error {
				state, epoch, err := c.Outcome(cmd.Context(), id, fence)
				if err != nil {
					return err
				}
				return a.printOutcome(state, epoch)
			})
		},
	}
	cmd.Flags().BoolVar(&fence, "fence", false, "cancel the write if it was not executed")
	return cmd
}

// errNotExecuted ends a command that has printed that a write was not executed.
var errNotExecuted = fmt.Errorf("the write was not executed: %w", errNotApplied)

// errOutcomeUnknown ends a command that has printed that the server does not know.
var errOutcomeUnknown = errors.New("the server does not know any more what became of the write")

// printOutcome prints the state, and returns the error that decides on the exit code.
func (a *app) printOutcome(state client.OutcomeState, epoch client.Epoch) error {
	var err error
	name := outcomeNames[state]
	switch {
	case a.formatOr(formatRaw) == formatJSON || a.format == formatJSONL:
		err = a.print("{\"state\":%q,\"epoch\":%d}\n", name, epoch)
	case state == client.Applied:
		err = a.print("%s %d\n", name, epoch)
	default:
		err = a.print("%s\n", name)
	}
	switch {
	case err != nil:
		return err
	case state == client.Expired:
		return saidError{errOutcomeUnknown}
	case state != client.Applied:
		return saidError{errNotExecuted}
	}
	return nil
}

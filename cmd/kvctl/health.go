package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) healthCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "health",
		Short: "Check whether the server serves requests",
		Long: `Ask the server by the standard gRPC health protocol, and print the active conditions, for instance a full disk or a damaged page.
The exit code is 0 if the server serves requests, else 6. A condition of severity warning or degraded does not change the exit code: its text
says which requests are refused, and "kvctl status" shows it with the sizes.`,
		Example: `  kvctl health
  until kvctl health --timeout 1s >/dev/null 2>&1; do sleep 0.1; done`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				serving, err := c.Healthy(cmd.Context())
				if err != nil {
					return err
				}
				// A server that is too busy, or too old, to tell more is still healthy or not.
				ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
				defer cancel()
				status, _ := c.Status(ctx)
				conditions := status.GetHealth().GetConditions()
				if err := a.printHealth(serving, conditions); err != nil {
					return err
				}
				if !serving {
					return errNotServing
				}
				return nil
			})
		},
	}
}

// printHealth prints the outcome, and the conditions that hold, the worst first.
func (a *app) printHealth(serving bool, conditions []*kvpb.Condition) error {
	format := a.formatOr(formatTable)
	switch format {
	case formatTable, formatRaw:
		text := ""
		if serving {
			text = "serving\n"
		}
		for _, c := range conditions {
			text += conditionText(c) + "\n"
		}
		return a.print("%s", a.painted(text))
	}
	type condition struct {
		Name     string `json:"name"`
		Severity string `json:"severity"`
		Message  string `json:"message"`
		Cause    string `json:"cause,omitempty"`
		Since    string `json:"since"`
	}
	line := struct {
		Serving    bool        `json:"serving"`
		Conditions []condition `json:"conditions,omitempty"`
	}{Serving: serving}
	for _, c := range conditions {
		line.Conditions = append(line.Conditions, condition{
			Name: c.GetName(), Severity: severityText(c), Message: c.GetMessage(), Cause: c.GetCause(), Since: sinceText(c),
		})
	}
	if !serving && len(conditions) == 0 {
		return nil // as before: the error says it
	}
	return a.printJSON(format, line)
}

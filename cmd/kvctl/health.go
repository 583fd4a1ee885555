package main

import (
	"github.com/spf13/cobra"

	"epochkv/client"
)

func (a *app) healthCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "health",
		Short: "Check whether the server serves requests",
		Long:  `Ask the server by the standard gRPC health protocol. The exit code is 0 if it serves requests, else 6.`,
		Example: `  kvctl health
  until kvctl health --timeout 1s >/dev/null 2>&1; do sleep 0.1; done`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				serving, err := c.Healthy(cmd.Context())
				if err != nil {
					return err
				}
				if !serving {
					return errNotServing
				}
				switch a.formatOr(formatJSONL) {
				case formatTable, formatRaw:
					return a.print("serving\n")
				}
				return a.print("{\"serving\":true}\n")
			})
		},
	}
}

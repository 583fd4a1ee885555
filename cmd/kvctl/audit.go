package main

import (
	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/internal/audit"
)

func (a *app) auditCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "audit",
		Short:   "Check the audit log of a server",
		Long:    `Check the files of an audit log (--audit-file of the server).`,
		Example: `  kvctl audit verify /var/log/epochkv/audit.log*`,
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(a.auditVerifyCommand())
	return cmd
}

func (a *app) auditVerifyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "verify FILE...",
		Short: "Name the first line that was changed, removed or inserted",
		Long: `Check that the lines of an audit log follow each other, in the files in any order, and name the first line that was changed, removed or inserted.
Changes of a line are found only if the server has written it with --audit-chain; lines removed at the end only if the next lines are there. The hash
of the last line is printed, and is in the log of the server when a file is full and when it ends: keep it elsewhere.`,
		Example: `  kvctl audit verify /var/log/epochkv/audit.log*`,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			r, err := audit.Verify(args)
			if err != nil {
				return err
			}
			return a.printAudit(&r)
		},
	}
}

// auditReport is the result of a check as JSON shows it.
type auditReport struct {
	Files   int    `json:"files"`
	Lines   int    `json:"lines"`
	First   uint64 `json:"first"`
	Last    uint64 `json:"last"`
	Chained int    `json:"chained_lines"`
	Unclean int    `json:"unclean_ends"`
	Dropped bool   `json:"lines_were_dropped"`
	Hash    string `json:"last_hash"`
}

func (a *app) printAudit(r *audit.Report) error {
	out := auditReport{r.Files, r.Lines, r.First, r.Last, r.Chained, r.Unclean, r.Dropped, r.LastHash}
	if format := a.formatOr(formatTable); printsJSON(format) {
		return a.printJSON(format, out)
	}
	return a.print("%d lines in %d files follow each other: %d to %d\nwith hashes: %d; unclean ends: %d; lines were dropped: %v\nlast hash: %s\n",
		out.Lines, out.Files, out.First, out.Last, out.Chained, out.Unclean, out.Dropped, out.Hash)
}

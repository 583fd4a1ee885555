package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/internal/restore"
)

func (a *app) backupDrillCommand() *cobra.Command {
	f := restoreFlags{latest: true}
	cmd := &cobra.Command{
		Use:   "drill --from URL",
		Short: "Prove that the newest state can be restored",
		Long: `Restore the newest state that the backups and the log archive have into a directory that is made for it, open it, verify every page, and remove it. The
report has the epoch, its time, and how long a restore takes. Damage is named; if anything is missing, the exit code is 8. The server is not needed, and its work
is not disturbed but for the reading of the target.

The directory needs as much room as the store has. It is removed in any case; what a killed drill has left there is removed by the next one.`,
		Example: `  kvctl backup drill --from s3://backups/orders
  kvctl backup drill --from /mnt/backups --scratch /mnt/large -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			o, err := f.options()
			if err != nil {
				return err
			}
			o.Progress = a.restoreProgress()
			report, err := restore.Drill(ctx, o)
			if err != nil {
				return err
			}
			return a.printDrill(report)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.from, "from", "", "`URL` of backups and archive: a directory or s3://BUCKET/PREFIX")
	flags.StringVar(&f.dir, "scratch", ".", "`DIRECTORY` in which the directory of the drill is made")
	flags.StringVar(&f.lineage, "lineage", "", "the `LINEAGE` of the store, if URL has several")
	flags.StringVar(&f.history, "history", "", "the `FILE` of the log archive that the wanted history ends with, if copies of one store were archived to one place")
	_ = cmd.MarkFlagRequired("from")
	return cmd
}

func (a *app) printDrill(r *restore.Report) error {
	if format := a.formatOr(formatTable); printsJSON(format) {
		return a.printRestored(r, true)
	}
	base := "a store without a commit"
	if r.Base.ID != "" {
		base = "backup " + r.Base.ID
	}
	return a.print("the drill was successful: epoch %d %s was restored from %s and %d files of the log with %d records, and verified, in %v; its directory was removed\n",
		r.Reached.Epoch, pointTime(r.Reached), base, r.Files, r.Records, r.Took.Round(time.Millisecond))
}

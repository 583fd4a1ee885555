package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/restore"
)

// restoreFlags are the flags of restore.
type restoreFlags struct {
	from, lineage, history, dir, at string
	epoch                           uint64
	latest, keep, plan, damaged     bool
}

func (a *app) restoreCommand() *cobra.Command {
	var f restoreFlags
	cmd := &cobra.Command{
		Use:   "restore --from URL (--to-time TIME | --to-epoch EPOCH | --latest) --data-dir NEW",
		Short: "Make a store of a past state from backups and the log archive",
		Long: `Make a new data directory with the state of a past time or epoch, from the newest full backup before it and the log archive. The plan is checked before
anything is written. If the archive does not lead to the target, nothing is left and the exit code is 8; the message has the epochs that are missing, and the
latest state that can be restored.

The restored store is another one than the original: it has its own id and lineage, and archives under that. Resume tokens of watches do not go on there. Holds
are ended, and all access tokens are revoked unless --keep-tokens is given.`,
		Example: `  kvctl restore --from s3://backups/epochkv --to-time 2026-11-22T10:31:00Z --data-dir /var/lib/epochkv-restored
  kvctl restore --from /mnt/backup --latest --data-dir ./restored --plan`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := f.options()
			if err != nil {
				return err
			}
			o.Progress = a.restoreProgress()
			report, err := restore.Run(cmd.Context(), o)
			if err != nil {
				return err
			}
			if err := a.printRestored(report, f.plan); err != nil {
				return err
			}
			if n := len(report.Damages); n > 0 {
				return fmt.Errorf("%w: the store was restored, and has %d damages, as kvctl verify tells; the first is of page %d", errDamaged, n, report.Damages[0].Page)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.from, "from", "", "`URL` of backups and archive: a directory or s3://BUCKET/PREFIX")
	flags.StringVar(&f.at, "to-time", "", "the state after the last commit that is not later than this `TIME`, such as 2026-11-22T10:31:00Z")
	flags.Uint64Var(&f.epoch, "to-epoch", 0, "the state after the last commit that is not later than this `EPOCH`")
	flags.BoolVar(&f.latest, "latest", false, "the newest state that the archive has")
	flags.StringVar(&f.dir, "data-dir", "", "the new data `DIRECTORY`, which must be empty or not exist")
	flags.StringVar(&f.lineage, "lineage", "", "the `LINEAGE` of the store, if URL has several")
	flags.StringVar(&f.history, "history", "", "the `FILE` of the log archive that the wanted history ends with, if copies of one store were archived to one place")
	flags.BoolVar(&f.keep, "keep-tokens", false, "do not revoke the access tokens that existed then, among them tokens that were revoked since")
	flags.BoolVar(&f.damaged, "allow-damaged", false, "take a backup that was made with --keep-going, too: what its damaged pages had is lost, reads of it are errors, and the exit code is 8")
	flags.BoolVar(&f.plan, "plan", false, "only show what would be restored")
	return cmd
}

func (f *restoreFlags) options() (o restore.Options, err error) {
	o.Dir, o.History, o.KeepTokens, o.PlanOnly, o.AllowDamaged = f.dir, f.history, f.keep, f.plan, f.damaged
	targets := 0
	for _, given := range []bool{f.at != "", f.epoch != 0, f.latest} {
		if given {
			targets++
		}
	}
	switch {
	case f.from == "":
		return o, usageError{errors.New("--from is missing; it is where the backups and the archive are")}
	case targets != 1:
		return o, usageError{errors.New("expected one of --to-time, --to-epoch and --latest")}
	case f.dir == "" && !f.plan:
		return o, usageError{errors.New("--data-dir is missing; it is the directory that will be made")}
	}
	o.Target.Epoch = keys.Epoch(f.epoch)
	if f.at != "" {
		if o.Target.Time, err = time.Parse(time.RFC3339Nano, f.at); err != nil {
			return o, usageError{fmt.Errorf("--to-time %q is not a time; expected for instance 2026-11-22T10:31:00Z", f.at)}
		}
		if err := notZero(o.Target.Time); err != nil {
			return o, usageError{fmt.Errorf("--to-time %q: %w", f.at, err)}
		}
	}
	if backup.IsOldest(f.lineage) {
		o.Oldest = f.lineage
	} else if f.lineage != "" {
		raw, err := hex.DecodeString(f.lineage)
		if err != nil || len(raw) != len(o.Lineage) {
			return o, usageError{fmt.Errorf("--lineage %q is not a lineage; expected 32 hexadecimal digits, for a store that was not finalized after store-", f.lineage)}
		}
		o.Lineage = keys.Lineage(raw)
	}
	o.Store, err = objectstore.Open(f.from, objectstore.Options{})
	return o, err
}

// restoreProgress reports each step once, and long ones every second.
func (a *app) restoreProgress() func(restore.Progress) {
	step, last := "", time.Time{}
	return func(p restore.Progress) {
		if p.Step == step && time.Since(last) < time.Second {
			return
		}
		step, last = p.Step, time.Now()
		_, _ = fmt.Fprintf(a.err, "%s: epoch %d, %d records\n", p.Step, p.Epoch, p.Records)
	}
}

// restoreReport is a restore as JSON shows it.
type restoreReport struct {
	Lineage     string  `json:"lineage"`
	Base        string  `json:"base,omitempty"`
	BaseEpoch   uint64  `json:"base_epoch"`
	Files       int     `json:"files"`
	BulkLoads   int     `json:"bulk_loads"`
	FileBytes   int64   `json:"file_bytes"`
	Epoch       uint64  `json:"epoch"`
	Time        string  `json:"time,omitempty"`
	Records     uint64  `json:"records"`
	NewLineage  string  `json:"new_lineage,omitempty"`
	StoreID     string  `json:"store_id,omitempty"`
	Tokens      int     `json:"tokens_revoked"`
	Holds       int     `json:"holds_ended"`
	Damages     int     `json:"damages,omitempty"`
	LostSpace   string  `json:"lost_space,omitempty"`
	TookSeconds float64 `json:"took_seconds"`
}

func (a *app) printRestored(r *restore.Report, plan bool) error {
	if format := a.formatOr(formatTable); printsJSON(format) {
		out := restoreReport{
			Lineage: r.Lineage.String(), Base: r.Base.ID, BaseEpoch: uint64(r.Base.Epoch), Files: r.Files, BulkLoads: r.Loads, FileBytes: r.FileBytes, Epoch: uint64(r.Reached.Epoch),
			Time: pointTime(r.Reached), Records: r.Records, Tokens: r.Tokens, Holds: r.Holds, Damages: len(r.Damages), LostSpace: r.LostSpace, TookSeconds: r.Took.Seconds(),
		}
		if !plan {
			out.NewLineage, out.StoreID = r.NewLineage.String(), hex.EncodeToString(r.StoreID[:])
		}
		return a.printJSON(format, &out)
	}
	base := "a store without a commit"
	if r.Base.ID != "" {
		base = fmt.Sprintf("backup %s at epoch %d", r.Base.ID, r.Base.Epoch)
	}
	if plan {
		return a.print("would restore from %s and %d files with %d bulk loads, together %d bytes, which reach epoch %d %s\n", base, r.Files, r.Loads, r.FileBytes, r.Reached.Epoch, pointTime(r.Reached))
	}
	return a.print("restored epoch %d %s from %s, %d files and %d records in %v; lineage %s, %d tokens revoked, %d holds ended\n",
		r.Reached.Epoch, pointTime(r.Reached), base, r.Files, r.Records, r.Took.Round(time.Millisecond), r.NewLineage, r.Tokens, r.Holds)
}

func pointTime(p archive.Point) string {
	if p.Time.IsZero() {
		return ""
	}
	return p.Time.UTC().Format(time.RFC3339Nano)
}

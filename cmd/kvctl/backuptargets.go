package main

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// backupSource is the target that a command reads, itself or through the server.
type backupSource struct {
	from, lineage string
	server        bool
}

// addServerFlag is for the commands that the server executes as well.
func (s *backupSource) addServerFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&s.server, "server", false, "let the server do it: with its credentials, and by default for its own history")
}

func (s *backupSource) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.from, "from", "", "`TARGET` with the backups: s3://BUCKET/PREFIX, file:///PATH or a path")
	cmd.Flags().StringVar(&s.lineage, "lineage", "", "`HISTORY` of which the backups are, if the target has several (see kvctl status)")
	_ = cmd.MarkFlagRequired("from")
}

// open opens the target, and chooses the directory of a history.
func (s *backupSource) open(ctx context.Context) (objectstore.Store, string, error) {
	store, err := objectstore.Open(s.from, objectstore.Options{})
	if err != nil {
		return nil, "", usageError{err}
	}
	if s.lineage != "" {
		return store, s.lineage, nil
	}
	dirs, err := backup.Dirs(ctx, store)
	switch {
	case err != nil:
		return nil, "", err
	case len(dirs) == 0:
		return nil, "", fmt.Errorf("%w: %s has no backups", errNotFound, store)
	case len(dirs) > 1:
		return nil, "", usageError{fmt.Errorf("%s has backups of %d histories; name one with --lineage: %v", store, len(dirs), dirs)}
	}
	return store, dirs[0], nil
}

// find returns a backup by its id, or the newest one.
func (s *backupSource) find(ctx context.Context, args []string) (objectstore.Store, *backup.Manifest, error) {
	store, dir, err := s.open(ctx)
	if err != nil {
		return nil, nil, err
	}
	var m *backup.Manifest
	if len(args) > 0 {
		m, err = backup.Find(ctx, store, dir, args[0])
	} else {
		m, err = backup.Newest(ctx, store, dir)
	}
	return store, m, err
}

func (a *app) backupListCommand() *cobra.Command {
	var source backupSource
	cmd := &cobra.Command{
		Use:   "list --from TARGET",
		Short: "List the backups of a target, the oldest first",
		Long:  `List the backups of a target, the oldest first. Manifests that cannot be read are named, and the exit code is 8 then.`,
		Example: `  kvctl backup list --from /mnt/backups -o json
  kvctl backup list --server --from s3://backups/orders`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if source.server {
				return a.listBackupsByServer(cmd.Context(), &source)
			}
			store, dir, err := source.open(cmd.Context())
			if err != nil {
				return err
			}
			all, broken, err := backup.List(cmd.Context(), store, dir)
			if err != nil {
				return err
			}
			rows := make([]backupRow, len(all))
			for i, m := range all {
				rows[i] = rowOfManifest(m)
			}
			if err := a.printBackups(rows); err != nil || len(broken) == 0 {
				return err
			}
			return fmt.Errorf("%d manifests cannot be read; the first: %w", len(broken), broken[0])
		},
	}
	source.addFlags(cmd)
	source.addServerFlag(cmd)
	return cmd
}

func (a *app) listBackupsByServer(ctx context.Context, source *backupSource) error {
	return a.withClient(func(c *client.Client) error {
		list, err := c.ListBackups(ctx, &kvpb.ListBackupsRequest{Target: source.from, Lineage: source.lineage})
		if err != nil {
			return err
		}
		rows := make([]backupRow, len(list.GetBackups()))
		for i, b := range list.GetBackups() {
			rows[i] = rowOfInfo(b)
		}
		if err := a.printBackups(rows); err != nil || len(list.GetBroken()) == 0 {
			return err
		}
		return fmt.Errorf("%w: %d manifests cannot be read; the first: %s", errDamaged, len(list.GetBroken()), printable(list.GetBroken()[0]))
	})
}

func (a *app) backupShowCommand() *cobra.Command {
	var source backupSource
	cmd := &cobra.Command{
		Use:     "show [ID] --from TARGET",
		Short:   "Print the manifest of a backup",
		Long:    `Print the manifest of a backup, by default of the newest one, as JSON.`,
		Example: `  kvctl backup show --from /mnt/backups`,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, m, err := source.find(cmd.Context(), args)
			if err != nil {
				return err
			}
			return a.printJSON(a.formatOr(formatJSON), m)
		},
	}
	source.addFlags(cmd)
	return cmd
}

func (a *app) backupVerifyCommand() *cobra.Command {
	var source backupSource
	cmd := &cobra.Command{
		Use:   "verify [ID] --from TARGET",
		Short: "Read a backup, and check every byte",
		Long: `Read a backup, by default the newest one, and the backups on which it is based: every part against its hash, every page against its
checksum. Damage is named, and the exit code is 8. That a backup can be restored is proved only by a restore: kvctl backup drill.`,
		Example: `  kvctl backup verify --from s3://backups/orders`,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			r, err := a.verifyBackup(ctx, &source, args)
			if err != nil {
				return err
			}
			if format := a.formatOr(formatJSONL); format != formatTable {
				return a.printJSON(format, map[string]any{"id": r.GetId(), "backups": r.GetBackups(), "parts": r.GetParts(), "pages": r.GetPages(), "bytes": r.GetBytes()})
			}
			return a.print("backup %s is intact: %d parts of %d backups, %d pages, %s\n", r.GetId(), r.GetParts(), r.GetBackups(), r.GetPages(), size(r.GetBytes()))
		},
	}
	source.addFlags(cmd)
	source.addServerFlag(cmd)
	return cmd
}

// verifyBackup verifies the backup that args name, or the newest one, and shows how far it is.
func (a *app) verifyBackup(ctx context.Context, source *backupSource, args []string) (report *kvpb.BackupVerification, err error) {
	bar := progressbar.NewOptions64(-1, progressbar.OptionSetWriter(a.err), progressbar.OptionSetDescription("verifying"),
		progressbar.OptionShowBytes(true), progressbar.OptionClearOnFinish(), progressbar.OptionSetVisibility(a.errTerminal))
	defer func() { _ = bar.Finish() }()
	if source.server {
		request := &kvpb.VerifyBackupRequest{Target: source.from, Lineage: source.lineage}
		if len(args) > 0 {
			request.Id = args[0]
		}
		err = a.withClient(func(c *client.Client) (err error) {
			report, err = c.VerifyBackup(ctx, request, func(p *kvpb.BackupVerification) { _ = bar.Set64(int64(p.GetBytes())) })
			return err
		})
		return report, err
	}
	store, m, err := source.find(ctx, args)
	if err != nil {
		return nil, err
	}
	r, err := backup.Verify(ctx, store, m, func(r backup.VerifyReport) { _ = bar.Set64(r.Bytes) })
	return &kvpb.BackupVerification{Id: m.ID, Backups: r.Backups, Parts: r.Parts, Pages: r.Pages, Bytes: uint64(r.Bytes)}, err
}

// keepDaysMax is as many days as a duration has: with more, it would be negative, or short, and keep nothing.
const keepDaysMax = int(math.MaxInt64 / (24 * time.Hour))

func (a *app) backupPruneCommand() *cobra.Command {
	var source backupSource
	var options backup.PruneOptions
	var days int
	cmd := &cobra.Command{
		Use:   "prune --from TARGET",
		Short: "Remove old backups, and the log before them",
		Long: `Remove the backups that neither rule keeps: the newest full ones with what is based on them, and those of the last days. A backup on which
a kept one is based stays, and so does the newest one without damage. The parts of a removed backup are deleted by the first prune
an hour later. Nothing is removed while a restore reads the target, and no part while a backup writes to it.

The files of the log archive that are older than the oldest backup that stays are deleted, too: states before that backup cannot be restored any more.`,
		Example: `  kvctl backup prune --from s3://backups/orders --keep-full 4 --keep-days 30
  kvctl backup prune --from /mnt/backups --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			if options.KeepFull < 0 || days < 0 {
				return usageError{fmt.Errorf("--keep-full %d and --keep-days %d: must not be negative", options.KeepFull, days)}
			}
			options.KeepFor = time.Duration(min(days, keepDaysMax)) * 24 * time.Hour
			r, err := a.pruneBackups(ctx, &source, options)
			if err != nil {
				return err
			}
			return a.printPruned(r, options.DryRun)
		},
	}
	source.addFlags(cmd)
	source.addServerFlag(cmd)
	flags := cmd.Flags()
	flags.IntVar(&options.KeepFull, "keep-full", 4, "keep the newest `N` full backups, and what is based on them")
	flags.IntVar(&days, "keep-days", 30, "keep the backups of the last `N` days")
	flags.BoolVar(&options.DryRun, "dry-run", false, "say what would be removed, and remove nothing")
	return cmd
}

func (a *app) pruneBackups(ctx context.Context, source *backupSource, o backup.PruneOptions) (out *kvpb.PruneBackupsResponse, err error) {
	if source.server {
		err = a.withClient(func(c *client.Client) (err error) {
			out, err = c.PruneBackups(ctx, &kvpb.PruneBackupsRequest{
				Target: source.from, Lineage: source.lineage, KeepFull: uint32(min(o.KeepFull, math.MaxInt32)), KeepFor: durationpb.New(o.KeepFor), DryRun: o.DryRun,
			})
			return err
		})
		return out, err
	}
	store, dir, err := source.open(ctx)
	if err != nil {
		return nil, err
	}
	var log archive.Pruned
	o.Log = archive.PruneBefore(store, dir, o.DryRun, &log)
	r, err := backup.Prune(ctx, store, dir, o)
	if err != nil {
		return nil, err
	}
	return &kvpb.PruneBackupsResponse{
		Removed: r.Backups, Kept: r.Kept, Parts: r.Parts, PartBytes: uint64(r.PartBytes), WaitingParts: r.Waiting, Postponed: r.Postponed,
		LogFiles: uint64(log.Files), LogBytes: uint64(log.Bytes), LogThroughEpoch: uint64(log.Through), OldestEpoch: uint64(r.Oldest),
	}, nil
}

func (a *app) printPruned(r *kvpb.PruneBackupsResponse, dryRun bool) error {
	if format := a.formatOr(formatJSONL); format != formatTable {
		return a.printJSON(format, map[string]any{
			"removed": append([]string{}, r.GetRemoved()...), "kept": append([]string{}, r.GetKept()...), "parts": r.GetParts(), "bytes": r.GetPartBytes(), "waiting_parts": r.GetWaitingParts(),
			"postponed": r.GetPostponed(), "dry_run": dryRun, "log_files": r.GetLogFiles(), "log_bytes": r.GetLogBytes(),
			"log_through_epoch": r.GetLogThroughEpoch(), "oldest_epoch": r.GetOldestEpoch(),
		})
	}
	text := ""
	for _, id := range r.GetRemoved() {
		text += "removed " + id + "\n"
	}
	text += fmt.Sprintf("%d backups kept, %d removed; %d parts deleted (%s), %d parts wait\n", len(r.GetKept()), len(r.GetRemoved()), r.GetParts(), size(r.GetPartBytes()), r.GetWaitingParts())
	if r.GetLogFiles() > 0 {
		text += fmt.Sprintf("%d files of the log archive deleted (%s), up to epoch %d: the oldest state that can be restored is of epoch %d\n",
			r.GetLogFiles(), size(r.GetLogBytes()), r.GetLogThroughEpoch(), r.GetOldestEpoch())
	}
	if r.GetPostponed() != "" {
		text += "something reads or writes the target, so the rest is left to the next prune: " + r.GetPostponed() + "\n"
	}
	if dryRun {
		text += "nothing was changed: --dry-run\n"
	}
	return a.print("%s", text)
}

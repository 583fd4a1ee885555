package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

func (a *app) backupCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Back up the store to a directory or a bucket, and look after the backups",
		Long: `Make, list, verify and prune backups. A target is s3://BUCKET/PREFIX, file:///PATH or an absolute path. "create" needs the server, which
writes to the target; the other commands read the target themselves and need no server. Endpoint and credentials of S3 are taken
from the environment: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.`,
		Example: `  kvctl backup create --to s3://backups/orders
  kvctl backup list --from s3://backups/orders
  kvctl backup verify --from s3://backups/orders`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(a.backupCreateCommand(), a.backupStatusCommand(), a.backupListCommand(), a.backupShowCommand(), a.backupVerifyCommand(), a.backupDrillCommand(), a.backupPruneCommand())
	return cmd
}

// backupRow is a backup as it is printed.
type backupRow struct {
	ID         string `json:"id"`
	Kind       string `json:"kind"`
	Created    string `json:"created"`
	Epoch      uint64 `json:"epoch"`
	CommitTime string `json:"commit_time,omitempty"`
	Pages      uint64 `json:"pages"`
	LivePages  uint64 `json:"live_pages"`
	Parts      uint64 `json:"parts"`
	Bytes      uint64 `json:"bytes"`
	Base       string `json:"base,omitempty"`
	Damaged    uint64 `json:"damaged_pages"`
	Lineage    string `json:"lineage"`
}

func rowOfManifest(m *backup.Manifest) backupRow {
	r := backupRow{
		ID: m.ID, Kind: string(m.Kind), Created: m.Created.Format(time.RFC3339), Epoch: m.State.Epoch, Pages: m.Pages, LivePages: m.LivePages,
		Parts: uint64(len(m.Parts)), Bytes: uint64(m.Bytes()), Damaged: uint64(len(m.Damaged)), Lineage: m.State.Lineage,
	}
	if at := m.CommitTime(); !at.IsZero() {
		r.CommitTime = at.Format(time.RFC3339Nano)
	}
	if m.Base != nil {
		r.Base = m.Base.ID
	}
	return r
}

func rowOfInfo(b *kvpb.BackupInfo) backupRow {
	r := backupRow{
		ID: b.GetId(), Kind: b.GetKind(), Created: b.GetCreateTime().AsTime().Format(time.RFC3339), Epoch: b.GetEpoch(), Pages: b.GetPages(),
		LivePages: b.GetLivePages(), Parts: b.GetParts(), Bytes: b.GetBytes(), Base: b.GetBase(), Damaged: b.GetDamagedPages(), Lineage: b.GetLineage(),
	}
	if at := b.GetCommitTime(); at != nil {
		r.CommitTime = at.AsTime().Format(time.RFC3339Nano)
	}
	return r
}

func (a *app) printBackups(rows []backupRow) error {
	if printed, err := printRows(a, rows); printed {
		return err
	}
	table := [][]string{{"ID", "KIND", "CREATED", "EPOCH", "PAGES", "SIZE", "BASE", "DAMAGED"}}
	for i := range rows {
		r := &rows[i]
		table = append(table, []string{r.ID, r.Kind, r.Created, fmt.Sprint(r.Epoch), fmt.Sprint(r.Pages), size(r.Bytes), r.Base, fmt.Sprint(r.Damaged)})
	}
	return a.writeTable(table)
}

func (a *app) backupCreateCommand() *cobra.Command {
	var request kvpb.CreateBackupRequest
	var bandwidth string
	cmd := &cobra.Command{
		Use:   "create --to TARGET",
		Short: "Make a backup of a running server",
		Long: `Make a backup of the newest state of a running server. The server writes to the target. Every page is checked: a damaged one fails the
backup and is named. Ctrl-C ends the backup; the next one uses what was sent.

With --base the backup has only the pages that were written since that backup, and needs it for a restore. "--base latest" chooses the
newest one, and makes a full backup if there is none.`,
		Example: `  kvctl backup create --to /mnt/backups
  kvctl backup create --to s3://backups/orders --base latest --bandwidth 50MiB`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if request.Bandwidth, err = optionalBytes(bandwidth); err != nil {
				return err
			}
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			return a.withClient(func(c *client.Client) error { return a.createBackup(ctx, c, &request) })
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&request.Target, "to", "", "`TARGET`, as the server sees it: s3://BUCKET/PREFIX or an absolute path")
	flags.StringVar(&request.Base, "base", "", "`ID` of the backup on which this one is based, or latest (default: a full backup)")
	flags.StringVar(&bandwidth, "bandwidth", "", "read at most so much per second, as `SIZE`: 50MiB for instance (default: as fast as it goes)")
	flags.BoolVar(&request.KeepGoing, "keep-going", false, "complete the backup although pages are damaged; it is marked, and never a base")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

func optionalBytes(text string) (uint64, error) {
	if text == "" {
		return 0, nil
	}
	return parseBytes(text)
}

func (a *app) createBackup(ctx context.Context, c *client.Client, request *kvpb.CreateBackupRequest) error {
	bar := &pageBar{app: a, what: "backing up"}
	made, err := c.CreateBackup(ctx, request, func(p *kvpb.BackupProgress) { bar.at(p.GetPages(), p.GetPagesTotal(), p.GetDamagedPages()) })
	bar.finish()
	if err != nil {
		return err
	}
	if err := a.printBackups([]backupRow{rowOfInfo(made)}); err != nil {
		return err
	}
	if n := made.GetDamagedPages(); n > 0 {
		return fmt.Errorf("%w: %d pages are missing in backup %s", errDamaged, n, made.GetId())
	}
	return nil
}

func (a *app) backupStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show the backup that the server makes, and the last one",
		Long:    `Show the backup that the server makes now, and the last one that ended since it was started.`,
		Example: `  kvctl backup status`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				s, err := c.BackupStatus(cmd.Context())
				if err != nil {
					return err
				}
				if format := a.formatOr(formatJSONL); format != formatTable {
					return a.printMessage(format, s)
				}
				return a.print("%s", backupStatusText(s))
			})
		},
	}
}

func backupStatusText(s *kvpb.GetBackupStatusResponse) string {
	text := "no backup is being made\n"
	if r := s.GetRunning(); r != nil {
		p := r.GetProgress()
		text = fmt.Sprintf("backup to %s since %s: %d of %d pages, %s sent, %s of older states kept in the data file\n", r.GetTarget(),
			r.GetStartTime().AsTime().Format(time.RFC3339), p.GetPages(), p.GetPagesTotal(), size(p.GetBytesSent()), size(r.GetPinnedBytes()))
	}
	switch l := s.GetLast(); {
	case l.GetError() != "":
		text += fmt.Sprintf("the last one, to %s, failed at %s: %s\n", l.GetTarget(), l.GetEndTime().AsTime().Format(time.RFC3339), printable(l.GetError()))
	case l != nil:
		text += fmt.Sprintf("the last one, %s to %s, was complete at %s after %v\n", l.GetBackup().GetId(), l.GetTarget(),
			l.GetEndTime().AsTime().Format(time.RFC3339), l.GetDuration().AsDuration().Round(time.Millisecond))
	}
	return text
}

// backupSource is the target that a command reads.
type backupSource struct {
	from, lineage string
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
	if len(args) > 0 {
		m, err := backup.Find(ctx, store, dir, args[0])
		return store, m, err
	}
	all, broken, err := backup.List(ctx, store, dir)
	switch {
	case err != nil:
		return nil, nil, err
	case len(all) > 0:
		return store, all[len(all)-1], nil
	case len(broken) > 0:
		return nil, nil, broken[0]
	}
	return nil, nil, fmt.Errorf("%w: %s has no backups", errNotFound, store)
}

func (a *app) backupListCommand() *cobra.Command {
	var source backupSource
	cmd := &cobra.Command{
		Use:     "list --from TARGET",
		Short:   "List the backups of a target, the oldest first",
		Long:    `List the backups of a target, the oldest first. Manifests that cannot be read are named, and the exit code is 8 then.`,
		Example: `  kvctl backup list --from /mnt/backups -o json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
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
	return cmd
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
			store, m, err := source.find(ctx, args)
			if err != nil {
				return err
			}
			bar := progressbar.NewOptions64(-1, progressbar.OptionSetWriter(a.err), progressbar.OptionSetDescription("verifying"),
				progressbar.OptionShowBytes(true), progressbar.OptionClearOnFinish(), progressbar.OptionSetVisibility(a.errTerminal))
			r, err := backup.Verify(ctx, store, m, func(r backup.VerifyReport) { _ = bar.Set64(r.Bytes) }) // as above
			_ = bar.Finish()
			if err != nil {
				return err
			}
			if format := a.formatOr(formatJSONL); format != formatTable {
				return a.printJSON(format, map[string]any{"id": m.ID, "backups": r.Backups, "parts": r.Parts, "pages": r.Pages, "bytes": r.Bytes})
			}
			return a.print("backup %s is intact: %d parts of %d backups, %d pages, %s\n", m.ID, r.Parts, r.Backups, r.Pages, size(uint64(r.Bytes)))
		},
	}
	source.addFlags(cmd)
	return cmd
}

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
			options.KeepFor = time.Duration(days) * 24 * time.Hour
			store, dir, err := source.open(ctx)
			if err != nil {
				return err
			}
			var log archive.Pruned
			if raw, err := hex.DecodeString(dir); err == nil && len(raw) == len(keys.Lineage{}) {
				options.Log = func(ctx context.Context, oldest keys.Epoch) (err error) {
					log, err = archive.Prune(ctx, store, keys.Lineage(raw), oldest, options.DryRun)
					return err
				}
			}
			r, err := backup.Prune(ctx, store, dir, options)
			if err != nil {
				return err
			}
			return a.printPruned(r, &log, options.DryRun)
		},
	}
	source.addFlags(cmd)
	flags := cmd.Flags()
	flags.IntVar(&options.KeepFull, "keep-full", 4, "keep the newest `N` full backups, and what is based on them")
	flags.IntVar(&days, "keep-days", 30, "keep the backups of the last `N` days")
	flags.BoolVar(&options.DryRun, "dry-run", false, "say what would be removed, and remove nothing")
	return cmd
}

func (a *app) printPruned(r *backup.PruneReport, log *archive.Pruned, dryRun bool) error {
	if format := a.formatOr(formatJSONL); format != formatTable {
		return a.printJSON(format, map[string]any{
			"removed": r.Backups, "kept": r.Kept, "parts": r.Parts, "bytes": r.PartBytes, "waiting_parts": r.Waiting, "postponed": r.Postponed, "dry_run": dryRun,
			"log_files": log.Files, "log_bytes": log.Bytes, "log_through_epoch": log.Through, "oldest_epoch": r.Oldest,
		})
	}
	text := ""
	for _, id := range r.Backups {
		text += "removed " + id + "\n"
	}
	text += fmt.Sprintf("%d backups kept, %d removed; %d parts deleted (%s), %d parts wait\n", len(r.Kept), len(r.Backups), r.Parts, size(uint64(r.PartBytes)), r.Waiting)
	if log.Files > 0 {
		text += fmt.Sprintf("%d files of the log archive deleted (%s), up to epoch %d: the oldest state that can be restored is of epoch %d\n", log.Files, size(uint64(log.Bytes)), log.Through, r.Oldest)
	}
	if r.Postponed != "" {
		text += "something reads or writes the target, so the rest is left to the next prune: " + r.Postponed + "\n"
	}
	if dryRun {
		text += "nothing was changed: --dry-run\n"
	}
	return a.print("%s", text)
}

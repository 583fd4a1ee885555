package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/backup"
)

func (a *app) backupCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Back up the store to a directory or a bucket, and look after the backups",
		Long: `Make, list, verify and prune backups. A target is s3://BUCKET/PREFIX, file:///PATH or an absolute path. "create" needs the server, which
writes to the target; the other commands read the target themselves and need no server, unless --server makes it do the work.
Endpoint and credentials of S3 are taken from the environment of the process that reads: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.`,
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
		Parts: m.PartCount(), Bytes: uint64(m.Bytes()), Damaged: uint64(len(m.Damaged)), Lineage: m.State.Lineage,
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
	flags.BoolVar(&request.ReadAll, "read-all", false, "read and check everything: with --base also the pages that cannot have changed since, and the parts that the target has already")
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
				if format := a.formatOr(formatTable); printsJSON(format) {
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

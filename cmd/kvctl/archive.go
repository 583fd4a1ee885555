package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) archiveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "archive",
		Short:   "Show the log archive",
		Long:    `Show how far the log archive of the server is (--archive), and which states can be restored from it.`,
		Example: `  kvctl archive status`,
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(a.archiveStatusCommand())
	return cmd
}

// archiveReport is the state of an archive as JSON shows it.
type archiveReport struct {
	Enabled       bool          `json:"enabled"`
	Target        string        `json:"target"`
	Lineage       string        `json:"lineage"`
	ArchivedEpoch uint64        `json:"archived_epoch"`
	LagSeconds    float64       `json:"lag_seconds"`
	PendingBytes  uint64        `json:"pending_bytes"`
	HeldLogBytes  uint64        `json:"held_log_bytes"`
	Error         string        `json:"error,omitempty"`
	Refused       bool          `json:"refused,omitempty"`
	Files         uint64        `json:"files"`
	FileBytes     uint64        `json:"file_bytes"`
	Records       uint64        `json:"records"`
	BulkLoads     uint64        `json:"bulk_loads"`
	MergedFiles   uint64        `json:"merged_files"`
	MergeError    string        `json:"merge_error,omitempty"`
	BreakReason   string        `json:"break_reason,omitempty"`
	BreakEpoch    uint64        `json:"break_epoch,omitempty"`
	Owner         *ownerRow     `json:"owner,omitempty"`
	Restorable    []intervalRow `json:"restorable"`
}

// ownerRow is the process that archives the store.
type ownerRow struct {
	Host    string `json:"host"`
	Process int64  `json:"process"`
	Since   string `json:"since,omitempty"`
	Self    bool   `json:"self"`
}

func (o *ownerRow) String() string {
	text := fmt.Sprintf("process %d on host %s", o.Process, printable(o.Host))
	if o.Since != "" {
		text += " since " + o.Since
	}
	if o.Self {
		return text + ", which is this server"
	}
	return text
}

// intervalRow is a part of an archive without a hole.
type intervalRow struct {
	FirstEpoch uint64 `json:"first_epoch"`
	LastEpoch  uint64 `json:"last_epoch"`
	From       string `json:"from,omitempty"`
	To         string `json:"to,omitempty"`
}

func (a *app) archiveStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show how far the archive is, and what can be restored",
		Long: `Show how far the log archive is: its lag in time and bytes, which process owns the archive, why nothing is archived if that is so, and the intervals, by time and epoch, in which
every state has its log in the archive. A state can be restored if, besides, the interval begins at epoch 1 or has a full backup before the state.`,
		Example: `  kvctl archive status -o json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				out, err := c.ArchiveStatus(cmd.Context())
				if err != nil {
					return err
				}
				return a.printArchive(archiveReportOf(out))
			})
		},
	}
}

func archiveReportOf(out *kvpb.ArchiveStatusResponse) *archiveReport {
	r := &archiveReport{
		Enabled: out.GetEnabled(), Target: out.GetTarget(), Lineage: out.GetLineage(), ArchivedEpoch: out.GetArchivedEpoch(), LagSeconds: out.GetLag().AsDuration().Seconds(),
		PendingBytes: out.GetPendingBytes(), HeldLogBytes: out.GetHeldLogBytes(), Error: out.GetError(), Refused: out.GetRefused(),
		Files: out.GetFiles(), FileBytes: out.GetFileBytes(), Records: out.GetRecords(), BreakReason: out.GetBreakReason(), BreakEpoch: out.GetBreakEpoch(),
		BulkLoads: out.GetBulkLoads(), MergedFiles: out.GetMergedFiles(), MergeError: out.GetMergeError(), Restorable: []intervalRow{},
	}
	if o := out.GetOwner(); o != nil {
		r.Owner = &ownerRow{Host: o.GetHost(), Process: o.GetProcess(), Self: o.GetSelf()}
		if o.Since != nil {
			r.Owner.Since = o.GetSince().AsTime().Format(time.RFC3339)
		}
	}
	for _, i := range out.GetIntervals() {
		r.Restorable = append(r.Restorable, intervalRow{i.GetFirstEpoch(), i.GetLastEpoch(), timeText(i.GetOldestUs()), timeText(i.GetNewestUs())})
	}
	return r
}

func timeText(us uint64) string {
	if us == 0 {
		return ""
	}
	return time.UnixMicro(int64(us)).UTC().Format(time.RFC3339Nano)
}

func (a *app) printArchive(r *archiveReport) error {
	if format := a.formatOr(formatTable); printsJSON(format) {
		return a.printJSON(format, r)
	}
	if !r.Enabled {
		return a.print("the server has no archive; start it with --archive URL\n")
	}
	state := "archiving"
	switch {
	case r.Refused:
		state = "REFUSED: " + r.Error
	case r.Error != "":
		state = "FAILING: " + r.Error
	}
	owner := "not known yet"
	if r.Owner != nil {
		owner = r.Owner.String()
	}
	rows := [][]string{
		{"archive", r.Target},
		{"lineage", r.Lineage},
		{"state", state},
		{"owner", owner},
		{"archived epoch", fmt.Sprint(r.ArchivedEpoch)},
		{"lag", time.Duration(r.LagSeconds * float64(time.Second)).Round(time.Millisecond).String()},
		{"not archived", fmt.Sprintf("%d bytes read, %d bytes of log kept", r.PendingBytes, r.HeldLogBytes)},
		{"since the start", fmt.Sprintf("%d files, %d bytes, %d records, %d bulk loads; %d files merged", r.Files, r.FileBytes, r.Records, r.BulkLoads, r.MergedFiles)},
	}
	if r.MergeError != "" {
		rows = append(rows, []string{"not merged", r.MergeError})
	}
	if r.BreakReason != "" {
		rows = append(rows, []string{"begun anew", fmt.Sprintf("at epoch %d: %s; states since then need a full backup that was made after it", r.BreakEpoch, r.BreakReason)})
	}
	if err := writeRows(a.out, rows, make([]int, 2)); err != nil {
		return err
	}
	table := [][]string{{"FROM", "TO", "FIRST EPOCH", "LAST EPOCH"}}
	for _, i := range r.Restorable {
		table = append(table, []string{i.From, i.To, fmt.Sprint(i.FirstEpoch), fmt.Sprint(i.LastEpoch)})
	}
	if err := a.print("\n"); err != nil {
		return err
	}
	return a.writeTable(table)
}

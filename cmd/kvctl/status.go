package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the state of the server: epochs, sizes, sessions, limits",
		Example: `  kvctl status
  kvctl status -o json | jq .epochs.visible`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				status, err := c.Status(cmd.Context())
				if err != nil {
					return err
				}
				return a.printStatus(status)
			})
		},
	}
}

func (a *app) printStatus(s *kvpb.StatusResponse) error {
	format := a.formatOr(formatTable)
	if format == formatTable {
		return a.writeReport(statusRows(s))
	}
	return a.printMessage(format, s)
}

func statusRows(s *kvpb.StatusResponse) [][]string {
	var rows [][]string
	row := func(name, format string, args ...any) {
		rows = append(rows, []string{name, fmt.Sprintf(format, args...)})
	}

	build, health, epochs := s.GetBuild(), s.GetHealth(), s.GetEpochs()
	row("version", "%s %s %s", build.GetVersion(), build.GetGoVersion(), build.GetPlatform())
	row("uptime", "%s", s.GetUptime().AsDuration().Round(time.Second))
	row("health", "%s", healthText(health))
	for _, c := range health.GetConditions() {
		row("", "%s", conditionText(c))
	}
	row("epochs", "visible %d, durable %d, min visible %d", epochs.GetVisible(), epochs.GetDurable(), epochs.GetMinVisible())

	row("history", "%s", historyText(s.GetHistory()))

	sizes := s.GetSizes()
	row("data directory", "%s (%s free)", sizes.GetDataDir(), size(sizes.GetDiskFreeBytes()))
	row("memory", "%s of %s in use, resident %s",
		size(sizes.GetMemoryUsedBytes()), size(sizes.GetMemoryBudgetBytes()), size(sizes.GetResidentBytes()))
	row("memtables", "%s", size(sizes.GetMemtableBytes()))
	row("log", "%s in %d segments, buffers %s", size(sizes.GetLogBytes()), sizes.GetLogSegments(), size(sizes.GetLogBufferBytes()))
	row("data file", "%s, pages of %s", size(sizes.GetDataFileBytes()), size(uint64(sizes.GetPageBytes())))
	tree := s.GetTree()
	row("", "%s live, %s pending, %s free; %s", size(tree.GetLiveBytes()), size(tree.GetPendingBytes()), size(tree.GetFreeBytes()), treeText(tree))
	row("", "%.1f%% of the tree is superseded versions and tombstones; vacuum removed %d versions from %d pages",
		100*tree.GetDeadVersionRatio(), tree.GetVacuumedVersions(), tree.GetVacuumedPages())
	row("checkpoints", "%d in %s, %d bulk loads, write amplification %.1f, %d writes stalled for %s", tree.GetCheckpoints(),
		tree.GetCheckpointTime().AsDuration().Round(time.Millisecond), tree.GetBulkLoads(), tree.GetWriteAmplification(),
		tree.GetWriteStalls(), tree.GetWriteStallTime().AsDuration().Round(time.Millisecond))
	if n := tree.GetDamagedReads(); n > 0 {
		row("DAMAGE", "%d reads met a damaged page; run kvctl verify to find it", n)
	}
	row("cache", "%s of %s", size(sizes.GetCacheUsedBytes()), size(sizes.GetCacheBytes()))
	for _, g := range s.GetGenerations() {
		row("generation "+strconv.FormatUint(g.GetNumber(), 10), "%s, memtable %s, log %s",
			generationText(g), size(g.GetMemtableBytes()), size(g.GetLogBytes()))
	}

	sessions, limits := s.GetSessions(), s.GetLimits()
	row("sessions", "%d open, %d streams, %d requests in flight (%s)",
		sessions.GetOpen(), sessions.GetStreams(), sessions.GetRequestsInFlight(), size(sessions.GetBytesInFlight()))
	row("snapshots", "%d, oldest %s, %d snapshot leases of resume tokens",
		sessions.GetSnapshots(), sessions.GetOldestSnapshotAge().AsDuration().Round(time.Millisecond), sessions.GetSnapshotLeases())
	row("limits", "key %s, value %s, batch %s and %d operations", size(limits.GetKeyBytes()), size(limits.GetValueBytes()),
		size(limits.GetBatchBytes()), limits.GetBatchOperations())
	row("", "%d connections, %d streams each, %d requests and %s in flight", limits.GetConnections(),
		limits.GetStreamsPerConnection(), limits.GetRequestsInFlight(), size(limits.GetBytesInFlight()))
	rows = append(rows, []string{"recovery", recoveryText(s.GetRecovery())})
	for _, what := range s.GetRecovery().GetRepaired() {
		rows = append(rows, []string{"REPAIRED", what + ". No data is lost; check the device"})
	}
	return rows
}

// historyText names the history of the store and its feature level.
func historyText(h *kvpb.History) string {
	text := fmt.Sprintf("feature level %d", h.GetFeatureLevel())
	if h.GetFeatureLevel() < h.GetFeatureLevelNewest() {
		text += fmt.Sprintf(" of %d: earlier versions can open the store until kvctl upgrade finalize", h.GetFeatureLevelNewest())
	}
	if len(h.GetLineage()) > 0 {
		text = fmt.Sprintf("lineage %x, term %d, %s", h.GetLineage(), h.GetTerm(), text)
	}
	if t := h.GetCommitTime(); t != nil {
		text += ", newest checkpoint has commits until " + t.AsTime().Format(time.RFC3339)
	}
	return text
}

func healthText(h *kvpb.Health) string {
	text := map[kvpb.Health_State]string{
		kvpb.Health_STATE_SERVING:     "serving",
		kvpb.Health_STATE_DRAINING:    "shutting down",
		kvpb.Health_STATE_READ_ONLY:   "READ ONLY: no writes are accepted",
		kvpb.Health_STATE_UNAVAILABLE: "UNAVAILABLE",
	}[h.GetState()]
	if text == "" {
		text = "unknown"
	}
	if h.GetCause() != "" && len(h.GetConditions()) == 0 { // each condition has a row of its own
		text += " (" + h.GetCause() + ")"
	}
	return text
}

// treeText describes the data file. Later commits are in the memtables and in the log, and not lost.
func treeText(t *kvpb.Tree) string {
	if t.GetEpoch() == 0 {
		return "no checkpoint yet: everything is in memtables and log"
	}
	return fmt.Sprintf("%d keys in %d levels as of the checkpoint at epoch %d", t.GetKeys(), t.GetHeight(), t.GetEpoch())
}

func conditionText(c *kvpb.Condition) string {
	text := fmt.Sprintf("%s since %s: %s: %s", severityText(c), sinceText(c), c.GetName(), c.GetMessage())
	if c.GetCause() != "" {
		text += ": " + c.GetCause()
	}
	return text
}

func severityText(c *kvpb.Condition) string {
	return strings.ToLower(strings.TrimPrefix(c.GetSeverity().String(), "SEVERITY_"))
}

func sinceText(c *kvpb.Condition) string { return c.GetSince().AsTime().Format(time.RFC3339) }

func generationText(g *kvpb.Generation) string {
	state := "immutable"
	if g.GetActive() {
		state = "active"
	}
	if g.GetLastEpoch() == 0 {
		return fmt.Sprintf("%s, epochs from %d", state, g.GetFirstEpoch())
	}
	return fmt.Sprintf("%s, epochs %d to %d", state, g.GetFirstEpoch(), g.GetLastEpoch())
}

func recoveryText(r *kvpb.Recovery) string {
	text := fmt.Sprintf("%d records (%s) replayed in %s", r.GetRecords(), size(r.GetBytes()),
		r.GetDuration().AsDuration().Round(time.Millisecond))
	if r.GetTornFile() != "" {
		text += fmt.Sprintf("; cut a torn tail of %s at %d in %s", size(r.GetTornBytes()), r.GetTornOffset(), r.GetTornFile())
	}
	if next, newest := r.GetNextEpoch(), r.GetEpoch(); next > newest+1 {
		text += fmt.Sprintf("; skipped %d epochs after an unclean end, continues at %d", next-newest-1, next)
	}
	return text
}

// size shows bytes in the unit that leaves one to four digits before the point.
func size(bytes uint64) string {
	if bytes < 1024 {
		return strconv.FormatUint(bytes, 10) + " B"
	}
	value, unit := float64(bytes), -1
	for value >= 1024 && unit < 4 {
		value /= 1024
		unit++
	}
	return strconv.FormatFloat(value, 'f', 1, 64) + " " + []string{"KiB", "MiB", "GiB", "TiB", "PiB"}[unit]
}

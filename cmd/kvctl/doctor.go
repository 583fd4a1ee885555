package main

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// errProblems ends doctor, which has said what they are.
var errProblems = errors.New("the server has a problem that needs a person")

// remedies say what to do about each condition; docs/runbook.md has a section for each.
var remedies = map[string]string{
	"store-failed":                 "look at the device and the server's log, then restart the server; reads continue until then",
	"probe-failing":                "the device does not answer writes: look at its health, and at the server's log",
	"disk-full":                    "delete keys or free space in another way; writes are accepted again without a restart",
	"memory-full":                  "writers are faster than checkpoints, or the host is short of memory: raise --memory, or lower it on a small host",
	"checkpoints-failing":          "the cause names the error: mend it before memory and disk are full",
	"data-damaged":                 "kvctl verify names the damage; copy the data directory, restore a backup or use kvctl salvage",
	"writes-stalled":               "writes wait for checkpoints: a faster device, more --memory or more --checkpoint-workers",
	"disk-low":                     "free space before the disk is full: kvctl space --by-prefix, kvctl log holders",
	"log-segment":                  "no log segment could be prepared: the cause names the error",
	"start-incomplete":             "check the device, then restart the server: the next start rebuilds the tables again",
	"values-not-freed":             "check the device; the server frees them once it can read their pages",
	"entries-quarantined":          "kvctl verify lists the keys: overwrite or delete them",
	"expiry-lagging":               "more keys expire than are deleted: see the runbook",
	"expiry-damaged":               "kvctl verify names the damage; keys that it hides are not deleted at their deadlines",
	"clock-differs":                "correct the system's time, or accept it with kvctl clock accept",
	"change-log-damaged":           "watches that need the damaged part have to begin again with a snapshot",
	"leases-lagging":               "more leases end than are revoked: see the runbook",
	"leases-damaged":               "kvctl verify names the damage; leases in it do not end",
	"old-snapshot":                 "kvctl snapshots list names its client, kvctl snapshots end ends it",
	"archive-refused":              "kvctl archive status names the reason: give --archive a target of this store's own",
	"archive-in-use":               "two copies of this store run: end one, and see the runbook before that",
	"archive-failing":              "the cause names the error; the log is kept meanwhile, which takes disk space",
	"archive-lagging":              "a faster archive target, or a longer --archive-interval",
	"archive-without-base":         "the server makes a full backup by itself, kvctl backup status says how far it is; without it: kvctl backup create",
	"backup-failing":               "the cause names the error: correct it, and make a backup: kvctl backup create",
	"restore-drill-failing":        "the cause names what could not be restored: kvctl backup verify, and make a full backup: kvctl backup create",
	"restore-drill-on-data-device": "start the server with a --restore-drill-dir on another device: a drill needs as much room as the store has",
	"backup-old":                   "make a backup, and look why none was made: kvctl backup create, kvctl backup status",
	"tls-certificate-expires":      "replace the file of --tls-cert; kvctl tls reload, or SIGHUP, loads it",
	"tls-client-ca-expires":        "replace the file of --tls-client-ca; kvctl tls reload, or SIGHUP, loads it",
	"tls-revocation-list-old":      "replace the file of --tls-client-crl; kvctl tls reload, or SIGHUP, loads it",
	"tls-reload-failed":            "the cause names the file: correct it; new connections get the certificates before",
	"audit-failing":                "make room on the disk of --audit-file, or correct its permissions; the server tries again every second",
}

// problem is one known problem and its remedy.
type problem struct {
	Severity string `json:"severity"` // of conditions: unavailable, degraded, warning; note is no problem yet
	Problem  string `json:"problem"`
	Remedy   string `json:"remedy"`
}

const severityNote = "note"

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Look for known problems, and say what to do about them",
		Long: `Look for known problems in the state of the server: active conditions, space, memory, old snapshots, damage, limits, waiting writers, readers that
keep the log, the format of the store, and the connection itself. Each problem has a remedy; docs/runbook.md says more.

The exit code is 0 if there is nothing but notes, 1 if there is a problem, and 6 if the server serves no requests.`,
		Example: `  kvctl doctor
  kvctl doctor -o jsonl | jq -r .remedy`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				status, err := c.Status(cmd.Context())
				if err != nil {
					return err
				}
				return a.tellProblems(status, append(diagnose(status), a.diagnoseConnection()...))
			})
		},
	}
}

func (a *app) tellProblems(s *kvpb.StatusResponse, found []problem) error {
	switch format := a.formatOr(formatTable); format {
	case formatJSON, formatJSONL:
		if _, err := printRows(a, found); err != nil {
			return err
		}
	default:
		rows := [][]string{}
		for _, p := range found {
			rows = append(rows, []string{p.Severity, p.Problem}, []string{"", "-> " + p.Remedy})
		}
		if len(found) == 0 {
			rows = append(rows, []string{"ok", "no known problem"})
		}
		if err := a.writeReport(rows); err != nil {
			return err
		}
	}
	if s.GetHealth().GetState() != kvpb.Health_STATE_SERVING {
		return saidError{errNotServing}
	}
	for _, p := range found {
		if p.Severity != severityNote {
			return saidError{errProblems}
		}
	}
	return nil
}

// diagnose finds the problems that a status shows, the active conditions first.
func diagnose(s *kvpb.StatusResponse) (found []problem) {
	for _, c := range s.GetHealth().GetConditions() {
		remedy := remedies[c.GetName()]
		if remedy == "" {
			remedy = "see the server's log, and the runbook of its version"
		}
		found = append(found, problem{severityText(c), conditionText(c), remedy})
	}
	for _, look := range []func(*kvpb.StatusResponse) (problem, bool){
		notServing, diskNearlyFull, memoryOverBudget, oldSnapshot, damagedReads, repairedAtStart, writersWait, nearLimits, oldFormat, justStarted,
	} {
		if p, ok := look(s); ok {
			found = append(found, p)
		}
	}
	for _, h := range s.GetLogHolders() {
		if h.GetBytesMax() > 0 && h.GetBytes() > h.GetBytesMax()/10*9 {
			found = append(found, problem{
				severityNote, fmt.Sprintf("%s %s keeps %s of log and ends at %s", h.GetName(), h.GetOwner(), size(h.GetBytes()), size(h.GetBytesMax())),
				"what reads the log for it is slow: kvctl log holders, kvctl feed list",
			})
		}
	}
	return found
}

func notServing(s *kvpb.StatusResponse) (problem, bool) {
	h := s.GetHealth()
	return problem{"unavailable", "the server does not serve: " + healthText(h), "wait if it shuts down or starts; otherwise its log says why, and a restart helps once the cause is gone"},
		h.GetState() != kvpb.Health_STATE_SERVING && len(h.GetConditions()) == 0
}

func diskNearlyFull(s *kvpb.StatusResponse) (problem, bool) {
	free, file := s.GetSizes().GetDiskFreeBytes(), s.GetSizes().GetDataFileBytes()
	return problem{severityNote, fmt.Sprintf("%s of disk are free, less than a tenth of the data file", size(free)), remedies["disk-low"]},
		free > 0 && free < file/10
}

func memoryOverBudget(s *kvpb.StatusResponse) (problem, bool) {
	resident, budget := s.GetSizes().GetResidentBytes(), s.GetSizes().GetMemoryBudgetBytes()
	return problem{
			"warning", fmt.Sprintf("the process takes %s of memory, for a --memory of %s", size(resident), size(budget)),
			"lower --memory if the host is short of it; Resident memory in docs/operations.md says what comes beside it",
		},
		budget >= 256<<20 && resident > budget/2*3
}

func oldSnapshot(s *kvpb.StatusResponse) (problem, bool) {
	age := s.GetSessions().GetOldestSnapshotAge().AsDuration()
	return problem{severityNote, fmt.Sprintf("a snapshot is %v old and keeps old versions of all keys", age.Round(time.Second)), remedies["old-snapshot"]},
		age > 10*time.Minute
}

func damagedReads(s *kvpb.StatusResponse) (problem, bool) {
	n := s.GetTree().GetDamagedReads()
	return problem{"warning", fmt.Sprintf("%d reads met a damaged page since the start", n), remedies["data-damaged"]}, n > 0
}

func repairedAtStart(s *kvpb.StatusResponse) (problem, bool) {
	repaired := s.GetRecovery().GetRepaired()
	return problem{"warning", fmt.Sprintf("the start repaired %d places: %v", len(repaired), repaired), "nothing is lost, but the device loses bytes: check it, and run kvctl verify"}, len(repaired) > 0
}

func writersWait(s *kvpb.StatusResponse) (problem, bool) {
	delay := s.GetTree().GetThrottleDelayPerKib().AsDuration()
	return problem{severityNote, fmt.Sprintf("writers are slowed down by %v for each KiB, because checkpoints lag", delay), remedies["writes-stalled"]},
		delay >= 10*time.Microsecond
}

func nearLimits(s *kvpb.StatusResponse) (problem, bool) {
	open, most := s.GetSessions().GetOpen(), s.GetLimits().GetConnections()
	return problem{"warning", fmt.Sprintf("%d sessions of %d connections are open", open, most), "use fewer connections in each client, or raise --max-connections"},
		most > 0 && open > most/10*9
}

func oldFormat(s *kvpb.StatusResponse) (problem, bool) {
	level, newest := s.GetHistory().GetFeatureLevel(), s.GetHistory().GetFeatureLevelNewest()
	return problem{severityNote, fmt.Sprintf("the store is at feature level %d of %d", level, newest), "kvctl upgrade finalize, once no older version of the server has to open it"}, level < newest
}

func justStarted(s *kvpb.StatusResponse) (problem, bool) {
	up := s.GetUptime().AsDuration()
	return problem{severityNote, "the server started less than a minute ago", "if nothing was planned, its log and that of its supervisor say why it ended"},
		up > 0 && up < time.Minute
}

// diagnoseConnection looks at the connection of kvctl itself.
func (a *app) diagnoseConnection() []problem {
	if host, _, err := net.SplitHostPort(a.endpoint); err != nil || a.speaksTLS() || host == "localhost" || net.ParseIP(host).IsLoopback() {
		return nil
	}
	return []problem{{"warning", "the connection to " + a.endpoint + " is plain text: everyone on the way reads it", "give the server a certificate; kvctl tls init makes one for a trial (docs/security.md)"}}
}

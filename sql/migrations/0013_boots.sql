-- Boots of nodes, which outlive a polluxd; and what rented nodes have gained.

CREATE TABLE pollux.boots (
    cluster  pollux.cluster_name PRIMARY KEY,
    seen     jsonb NOT NULL
);
COMMENT ON TABLE pollux.boots IS 'how long boots of nodes took, which nodes failed to boot, and since when nodes are on';

ALTER TABLE pollux.rental ADD COLUMN saved_seconds double precision NOT NULL DEFAULT 0;
COMMENT ON COLUMN pollux.rental.saved_seconds IS 'by how much sooner the job ends than on own nodes alone, as predicted';

GRANT SELECT ON pollux.boots TO pollux_read;

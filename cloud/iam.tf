# Three roles: AWS Batch itself, the machines it starts, and the agent that starts a container.

locals {
  services = {
    batch   = "batch.amazonaws.com"
    machine = "ec2.amazonaws.com"
    agent   = "ecs-tasks.amazonaws.com"
  }
}

data "aws_iam_policy_document" "trust" {
  for_each = local.services

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = [each.value]
    }
  }
}

resource "aws_iam_role" "batch" {
  name_prefix        = "${var.name}-batch-"
  assume_role_policy = data.aws_iam_policy_document.trust["batch"].json
}

resource "aws_iam_role_policy_attachment" "batch" {
  role       = aws_iam_role.batch.name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AWSBatchServiceRole"
}

resource "aws_iam_role" "machine" {
  name_prefix        = "${var.name}-machine-"
  assume_role_policy = data.aws_iam_policy_document.trust["machine"].json
}

resource "aws_iam_role_policy_attachment" "machine" {
  role       = aws_iam_role.machine.name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_instance_profile" "machine" {
  name_prefix = "${var.name}-machine-"
  role        = aws_iam_role.machine.name
}

resource "aws_iam_role" "agent" {
  name_prefix        = "${var.name}-agent-"
  assume_role_policy = data.aws_iam_policy_document.trust["agent"].json
}

resource "aws_iam_role_policy_attachment" "agent" {
  role       = aws_iam_role.agent.name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

# It may read these secrets and no others.
data "aws_iam_policy_document" "secrets" {
  count = length(var.secret_names) > 0 ? 1 : 0

  statement {
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [for secret in aws_secretsmanager_secret.this : secret.arn]
  }
}

resource "aws_iam_role_policy" "secrets" {
  count       = length(var.secret_names) > 0 ? 1 : 0
  name_prefix = "secrets-"
  role        = aws_iam_role.agent.id
  policy      = data.aws_iam_policy_document.secrets[0].json
}
